"""What tests ask of adapters in real processes; run on every rank of a world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.engines.fsdp_jobs import asked, real, steps, virtual
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.uneven import batch
from tests.models.lora.models import VOCAB, build, lora, with_lora
from zpp_lab.config.model import ModelConfig
from zpp_lab.engines.build import build_engine

# name → (row of the parity table, base, further settings of the adapters)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "raw": ("zero3", "raw", {}),
    "raw_bf16": ("zero3_bf16", "raw", {}),
    "q4": ("zero3", "q4", {}),
    "q4_bf16": ("zero3_bf16_reduce", "q4", {}),
    "q2_zeropp": ("zeropp_bf16", "q2", {}),
    "stochastic": ("stochastic", "q4", {}),
    "backward_other_codec": ("backward_other_codec", "q4", {}),
    "stage2": ("stage2", "q4", {}),
    "one_block": ("weights8", "q4", {"targets": ["layers.1.*"]}),
    "first_block": ("zeropp_last", "q4", {"targets": ["layers.0.up"]}),
}

HELD = [batch(9, i, 0) for i in range(3)]


def parity(names: list[str], nodes: int, local: int) -> dict[str, str]:
    """Case → what differs between the engines after two steps and an evaluation."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for name in names:
        case, base, more = CASES[name]
        cfg = lora(base, **more)
        config = with_lora(case, nodes, local, cfg)
        outcomes = []
        for make in (real, virtual) if asked() else (real,):
            engine = make(config, build(cfg))
            done, _ = steps(engine)
            held = [engine.evaluate(3, HELD, wire) for wire in (True, False)]
            outcomes.append((done, held, kept(engine)))
        found[name] = differs(*outcomes) if asked() else ""
    return found


def pretrained(bases: dict[str, ModelConfig]) -> dict[str, str]:
    """Models of folders, each engine built as a run builds it, from the meta device."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, base in bases.items():
        config = configured("zeropp_bf16", 1, 2, gather="hierarchical")
        config = replace(config, model=replace(base, lora=lora("q4")))
        outcomes = []
        for engine in ("fsdp", "virtual") if asked() else ("fsdp",):
            own = replace(config, engine=replace(config.engine, name=engine))
            made = build_engine(own, VOCAB, torch.device("cpu"))
            done, _ = steps(made)
            held = [made.evaluate(3, HELD, wire) for wire in (True, False)]
            outcomes.append((done, held, kept(made)))
        found[name] = differs(*outcomes) if asked() else ""
    return found
