"""engine.compile: both engines compile the same blocks and agree to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from tests.engines.fsdp_jobs import asked
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from zpp_lab.config.model import ModelConfig
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.compile import compile_units

VOCAB = 37
TINY = ModelConfig(dim=16, layers=3, heads=2, kv_heads=1, ffn=24, vocab_size=VOCAB)
DEEP = replace(TINY, layers=12)


def outcome(case: str, name: Any, model: ModelConfig, compiled: bool = True) -> Any:
    chosen = configured(case, 1, 2, compile=compiled)
    config = replace(chosen, model=model)
    config = replace(config, engine=replace(config.engine, name=name))
    engine = build_engine(config, VOCAB, torch.device("cpu"))
    done = [engine.step(s, 1e-2, partial(batch, s), telemetry=False) for s in range(3)]
    held = [engine.evaluate(3, [batch(9, i, 0) for i in range(5)], wire=True)]
    results = [(r.loss, r.grad_norm, dict(r.bytes)) for r in done]
    return results, held, kept(engine)


def compared() -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    cases = {
        "zeropp_every": TINY,
        "backward_other_codec": replace(
            TINY, checkpoint_activations=True, qk_norm=True, z_loss=1e-3
        ),
    }
    for case, model in cases.items():
        mine = outcome(case, "fsdp", model)
        found[case] = differs(mine, outcome(case, "virtual", model)) if asked() else ""
    found["graphs"] = counters["stats"]["unique_graphs"]
    return found


def graphs_of_the_real_engine() -> dict[str, int]:
    """With hooks, gathers and telemetry around the blocks; traced, but not built."""
    settings = {"compile": True, "deterministic": False}
    config = replace(configured("weights8", 1, 2, **settings), model=DEEP)
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        engine = build_engine(config, VOCAB, torch.device("cpu"))
    counters.clear()
    found = {}
    for s in range(2):
        engine.step(s, 1e-2, partial(batch, 0), telemetry=s == 0)
        found[f"step {s}"] = counters["stats"]["unique_graphs"]
    engine.evaluate(2, [batch(0, 0, 0)], wire=True)
    engine.step(2, 1e-2, partial(batch, 0), telemetry=False)
    return {**found, "with evaluation": counters["stats"]["unique_graphs"]}


def test_all_blocks_share_one_graph() -> None:
    """A second one would cost every rank seconds at each start."""
    found = run_world(2, graphs_of_the_real_engine)
    assert found == {"step 0": 1, "step 1": 1, "with evaluation": 2}


def test_engines_do_not_share_compiled_code() -> None:
    """Else one with other options would run the other's, and shapes of both count together."""
    counters.clear()
    blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        for pair in (blocks[:2], blocks[2:]):
            compile_units([("", block) for block in pair], deterministic=False)
    for block in blocks * 2:
        block(torch.zeros(2, 4))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_engines_agree_to_the_bit() -> None:
    found = run_world(2, compared)
    assert found.pop("graphs") > 0, "nothing was compiled"
    assert found == {"zeropp_every": "", "backward_other_codec": ""}
