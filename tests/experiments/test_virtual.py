"""experiments/virtual/bench.py at a tiny size: both sides train alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engines.test_passes import tokens
from tests.experiments.scripts import loaded
from zpp_lab.config.compose import compose
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model

BENCH = loaded("experiments/virtual/bench.py")
SMALL = ["engine.device=cpu", "model.dim=32", "model.ffn=48", "cluster=2x2", "data.seq_len=8"]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_plain_accumulation_is_the_training_that_the_cluster_does() -> None:
    """zero3 in fp32 and plain accumulation differ by rounding only."""
    config = compose(["recipe=zero3", *SMALL])
    plain = BENCH.Plain(build_model(config.model, 61, seed=1), config)
    model = build_model(config.model, 61, seed=1)
    engine = VirtualEngine(model, build_plan(model, config), config)
    for step in range(3):
        mine = plain.step([tokens(step, rank, 0) for rank in range(4)])
        result = engine.step(step, config.train.lr, lambda r, m, s=step: tokens(s, r, m), False)
        assert mine == pytest.approx(result.loss, rel=1e-5)
