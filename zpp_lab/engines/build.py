"""From a config to an engine: device, model, units, recipe, plan."""

from __future__ import annotations

import torch
from torch import nn

from zpp_lab.config import Config, EngineConfig
from zpp_lab.engines.base import Engine
from zpp_lab.layout import Parameter
from zpp_lab.models import build_model
from zpp_lab.plan import Plan, Unit
from zpp_lab.recipe import DTYPES, Recipe


def pick_device(engine: EngineConfig) -> torch.device:
    """The device that `engine.device` names; ValueError when this machine has none such."""
    if engine.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(engine.device)
    except RuntimeError:
        raise ValueError(
            f"engine.device={engine.device!r}: use auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda, but torch sees no GPU here: use engine.device=cpu")
    return device


def build_engine(config: Config, vocab_size: int, device: torch.device) -> Engine:
    """The engine that `config` asks for, with its model on `device`."""
    if config.engine.name != "virtual":
        raise ValueError(f"engine={config.engine.name} is not built yet: use engine=virtual")
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
    """The model's units as FSDP2 would group them: each of `model.units()`, then the root with
    what is left, which stays gathered between forward and backward."""
    left = dict(model.named_parameters())
    units: list[Unit] = []
    for name, _ in model.units():  # type: ignore[operator]
        prefix = f"{name}."
        own = {n: left.pop(n) for n in list(left) if n.startswith(prefix)}
        units.append(_unit(name, own, world, reshard=True))
    if left:
        units.append(_unit("root", left, world, reshard=False))
    return units


def _unit(name: str, own: dict[str, nn.Parameter], world: int, reshard: bool) -> Unit:
    parameters = tuple(Parameter(n, tuple(p.shape), world) for n, p in own.items())
    trainable = frozenset(n for n, p in own.items() if p.requires_grad)
    return Unit(name, parameters, trainable, reshard)
