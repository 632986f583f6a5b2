"""Models with adapters for tests, small and with every awkward shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engines.fsdp_parity import configured
from tests.engines.uneven import build_uneven
from tests.models.hf_cases import settings
from zpp_lab.config.load import load
from zpp_lab.config.model import LoraConfig, ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.models import build_model
from zpp_lab.models.llama_hf import hf_config, hf_name, to_halves, turned
from zpp_lab.models.lora import adapter_value, add_adapters, is_adapter
from zpp_lab.tools.export.shards import write_safetensors

Q4 = {"bits": 4, "block_size": 64, "symmetric": False}
Q2 = {"bits": 2, "block_size": 16, "symmetric": False}
BASES: dict[str, dict[str, Any]] = {"raw": {}, "q4": {"base_codec": Q4}, "q2": {"base_codec": Q2}}


def lora(base: str = "q4", **changes: Any) -> LoraConfig:
    return load(LoraConfig, {"rank": 3, "alpha": 6.0, **BASES[base], **changes})


def with_lora(case: str, nodes: int, local: int, cfg: LoraConfig, **engine: Any) -> Config:
    """A row of the parity table, its model with adapters. The folder is not read: tests build
    their models themselves."""
    config = configured(case, nodes, local, **engine)
    model = ModelConfig(weights="pretrained", path="unread", lora=cfg)
    return replace(config, model=model)


VOCAB = 37
SHAPE = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 23}


def save_base(folder: Path, vocab: int = VOCAB, **shape: Any) -> ModelConfig:
    """A folder of transformers with a built-in decoder's first weights; the model's settings."""
    cfg = ModelConfig(**{**SHAPE, "vocab_size": vocab, **shape})
    weights = {n: p.detach() for n, p in build_model(cfg, vocab, seed=7).named_parameters()}
    own = {
        hf_name(n): to_halves(w, cfg.dim // cfg.heads) if turned(n) else w
        for n, w in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {n: tuple(w.shape) for n, w in own.items()}
    write_safetensors(folder, shapes, own.__getitem__, torch.float32)
    (folder / "config.json").write_text(json.dumps(hf_config(cfg, vocab, 64, 0)))
    return replace(cfg, weights="pretrained", path=str(folder))


def save_hf(folder: Path, kind: str, vocab: int = VOCAB) -> ModelConfig:
    """A folder with a tiny model of `kind` as transformers saves it; its settings."""
    options = settings(kind, {"vocab_size": vocab})
    model = build_model(options, vocab, seed=3)
    model.__class__ = type(model).__mro__[1]  # its own class again: save_pretrained is theirs
    model.save_pretrained(folder)
    return replace(options, options=None, path=str(folder), weights="pretrained")


def on_base(config: Config, base: ModelConfig, cfg: LoraConfig) -> Config:
    """`config` with adapters on the model that `save_base` has written."""
    return replace(config, model=replace(base, lora=cfg))


def build(cfg: LoraConfig) -> Any:
    """The uneven model with adapters whose B is not zero, so that every gradient is there."""
    model: Any = build_uneven()
    add_adapters(model, cfg, build_uneven)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.copy_(adapter_value(name.replace("lora_B", "lora_A"), tuple(p.shape), 5))
    return model
