"""From a config to an engine: device, model, units, recipe, plan."""

from __future__ import annotations

import os

import torch
from torch import nn

from zpp_lab.config import Config, EngineConfig
from zpp_lab.engines.base import Engine
from zpp_lab.engines.units import cut_units
from zpp_lab.models import build_model
from zpp_lab.plan import Plan, Unit
from zpp_lab.recipe import DTYPES, Recipe


def pick_device(engine: EngineConfig) -> torch.device:
    """The device that `engine.device` names; ValueError when this machine has none such.

    With one process a rank, `cuda` is the GPU of this process's place on its machine.
    """
    if engine.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _own_gpu(device) if engine.name == "fsdp" else device
    try:
        device = torch.device(engine.device)
    except RuntimeError:
        raise ValueError(
            f"engine.device={engine.device!r}: use auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda, but torch sees no GPU here: use engine.device=cpu")
    return _own_gpu(device) if engine.name == "fsdp" else device


def _own_gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def build_engine(config: Config, vocab_size: int, device: torch.device) -> Engine:
    """The engine that `config` asks for, with its model on `device`."""
    if config.engine.name == "fsdp":
        from zpp_lab.engines.fsdp import FsdpEngine

        model = build_model(config.model, vocab_size, device="meta")
        return FsdpEngine(model, build_plan(model, config), config, device)
    if config.engine.name != "virtual":
        raise ValueError(f"engine={config.engine.name} is not built yet: use virtual or fsdp")
    from zpp_lab.engines.virtual import VirtualEngine

    model = build_model(config.model, vocab_size, device=str(device), seed=config.seed)
    return VirtualEngine(model, build_plan(model, config), config)


def build_plan(model: nn.Module, config: Config) -> Plan:
    """The recipe's data movement for this model on the configured cluster."""
    train, world = config.train, config.cluster.world
    recipe = Recipe(
        config.recipe, config.cluster, DTYPES[train.param_dtype], DTYPES[train.reduce_dtype]
    )
    return Plan.build(
        units_of(model, world),
        recipe,
        micro_steps=train.micro_steps,
        accumulate=train.accumulate,
        gather=config.engine.gather,
    )


def units_of(model: nn.Module, world: int) -> list[Unit]:
    """The model's units: each of `model.units()`, then the root with what is left."""
    return cut_units(model, model.units(), world)  # type: ignore[operator]
