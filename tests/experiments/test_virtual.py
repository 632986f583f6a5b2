"""experiments/virtual/bench.py at a tiny size: both sides train, and numbers are written."""

from __future__ import annotations

import json
from pathlib import Path

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
def _settings():
    yield
    torch.use_deterministic_algorithms(False)


def test_rows_and_ratios_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--recipes", "zero3,zeropp", "--steps", "2", "--out", str(out)]
    assert (
        BENCH.main([*arguments, "--variants", "engine.lanes=1", "engine.lanes=2", "--", *SMALL])
        == 0
    )
    found = json.loads(out.read_text())
    names = [f"{r} engine.lanes={n}" for r in ("zero3", "zeropp") for n in (1, 2)]
    assert [row["what"] for row in found["results"]] == ["plain", *names]
    plain = found["results"][0]
    assert plain["ratio"] == 1.0
    assert found["tokens_per_step"] == 4 * 4 * 8
    for row in found["results"]:
        assert len(row["times"]) == 2
        assert row["ratio"] == pytest.approx(row["seconds"] / plain["seconds"])
    assert "model tiny, 2 × 2 ranks" in capsys.readouterr().out


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


def test_a_setting_that_it_cannot_measure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.micro_steps=1"):
        BENCH.main(["train.micro_steps=2"])
