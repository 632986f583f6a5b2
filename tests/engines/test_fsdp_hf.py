"""Hugging Face models in both engines: the same bits, from random and from saved weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.engines.fsdp_jobs import asked
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from tests.models.hf_cases import VOCAB, settings
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_engine
from zpp_lab.models import build_model


def both(case: str, model: ModelConfig) -> str:
    """What differs after two steps, each engine built as a run builds it."""
    chosen = configured(case, 2, 2, gather="hierarchical")
    config = replace(chosen, model=model)
    outcomes = []
    for name in ("fsdp", "virtual") if asked() else ("fsdp",):
        engine = build_engine(named(config, name), VOCAB, torch.device("cpu"))
        done = [engine.step(s, 1e-2, partial(batch, s), telemetry=False) for s in range(2)]
        results = [(r.loss, r.grad_norm, dict(r.bytes)) for r in done]
        held = [engine.evaluate(3, [batch(9, i, 0) for i in range(5)], wire=True)]
        outcomes.append((results, held, kept(engine)))
    return differs(*outcomes) if asked() else ""


def named(config: Config, engine: Any) -> Config:
    return replace(config, engine=replace(config.engine, name=engine))


def compared(folder: str) -> dict[str, str]:
    torch.use_deterministic_algorithms(True)
    return {
        "random": both("zeropp_every", settings("gpt_neox", checkpoint_activations=True)),
        "tied": both("weights8", settings("qwen2", loss_chunk=5)),
        "pretrained": both("zeropp", settings("opt", path=folder, weights="pretrained")),
    }


def test_engines_agree_to_the_bit(tmp_path: Path) -> None:
    import transformers

    config = build_model(settings("opt"), VOCAB, "meta").config
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert run_world(4, compared, str(tmp_path)) == dict.fromkeys(
        ("random", "tied", "pretrained"), ""
    )
