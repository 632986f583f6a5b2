"""A frozen base in memory: what is planned, and what a real run holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tests.engines.fsdp_parity import configured
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from tests.models.lora.models import BASES, SHAPE, VOCAB, lora, on_base, save_base
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_engine, build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.models import build_model
from zpp_lab.train.memory.estimate import estimate


def settings(base: str, folder: str) -> Config:
    """`folder` as `save_base` has written it."""
    config = configured("zeropp_bf16", 1, 2, transport="groups", gather="hierarchical")
    shape = ModelConfig(**SHAPE, vocab_size=VOCAB, weights="pretrained", path=folder)
    return on_base(config, shape, lora(base))


def held(base: str, folder: str) -> dict[str, int]:
    """Bytes of one rank's tensors in a real run."""
    engine = build_engine(settings(base, folder), VOCAB, torch.device("cpu"))
    assert isinstance(engine, FsdpEngine)
    engine.step(0, 1e-2, partial(batch, 0), telemetry=False)
    engine.wrapped.reshard()
    every = dict(engine.model.named_parameters())
    storage = {n: p.to_local().untyped_storage() for n, p in every.items()}  # type: ignore[attr-defined]
    kept = engine.optimizer.state.values()
    rows = [u.gather.base for u in engine.wrapped.installed]
    return {
        "weights": sum(s.nbytes() for n, s in storage.items() if n not in engine.base.names),
        "largest aside": max(s.nbytes() for n, s in storage.items() if n in engine.base.names),
        "base": sum(row.nbytes for row in rows if row is not None),
        "optimizer": sum(s[k].to_local().nbytes for s in kept for k in ("exp_avg", "exp_avg_sq")),
    }


def all_held(folder: str) -> dict[str, dict[str, int]]:
    torch.use_deterministic_algorithms(True)
    return {base: held(base, folder) for base in BASES}


def test_a_rank_holds_its_payload_and_no_shard_of_the_base(tmp_path: Path) -> None:
    save_base(tmp_path)
    found = run_world(2, all_held, str(tmp_path))
    for base, there in found.items():
        config = settings(base, str(tmp_path))
        plan = build_plan(build_model(config.model, VOCAB, "meta"), config)
        planned = estimate(plan, config, VOCAB)
        assert there["base"] == planned.item("frozen base, encoded").most
        assert there["weights"] == planned.item("master weights, fp32").most
        assert there["optimizer"] == planned.item("optimizer state, fp32").most
        assert there["largest aside"] == 2  # one bf16 number
    assert found["q4"]["base"] < found["raw"]["base"]
