"""Models with adapters for tests, small and with every awkward shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.engines.fsdp_parity import configured
from tests.engines.uneven import build_uneven
from zpp_lab.config import Config, LoraConfig, ModelConfig, load
from zpp_lab.models.lora import adapter_value, add_adapters, is_adapter

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


def build(cfg: LoraConfig) -> Any:
    """The uneven model with adapters whose B is not zero, so that every gradient is there."""
    model: Any = build_uneven()
    add_adapters(model, cfg, build_uneven)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.copy_(adapter_value(name.replace("lora_B", "lora_A"), tuple(p.shape), 5))
    return model
