"""From a config to an engine: device, model, units, recipe, plan."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zpp_lab.collectives.plan import Plan, Unit
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config import Config, EngineConfig
from zpp_lab.engines.base import Engine
from zpp_lab.engines.units import cut_units, named_units
from zpp_lab.engines.untouched import is_untouched
from zpp_lab.models import build_model
from zpp_lab.models.lora import frozen_base


def pick_device(engine: EngineConfig) -> torch.device:
    """The device that `engine.device` names; ValueError when this machine has none such.

    With one process a rank, `cuda` is the GPU of this process's place on its machine.
    """
    if engine.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _own_gpu(device) if engine.ranked else device
    try:
        device = torch.device(engine.device)
    except RuntimeError:
        raise ValueError(
            f"engine.device={engine.device!r}: use auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda, but torch sees no GPU here: use engine.device=cpu")
    return _own_gpu(device) if engine.ranked else device


def _own_gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def build_engine(config: Config, vocab_size: int, device: torch.device) -> Engine:
    """The engine that `config` asks for, with its model on `device`."""
    check_engine(config)
    if config.engine.name == "fsdp":
        from zpp_lab.collectives.choose import gather_mode
        from zpp_lab.engines.fsdp import FsdpEngine

        model = _model(config, vocab_size, "meta")
        gather = gather_mode(config.engine.gather)
        chosen = replace(config, engine=replace(config.engine, gather=gather))  # type: ignore[arg-type]
        return FsdpEngine(model, build_plan(model, chosen), config, device)
    if config.engine.name == "deepspeed":
        from zpp_lab.engines.deepspeed import DeepSpeedEngine

        whole = build_model(config.model, vocab_size, device=device, seed=config.seed)
        return DeepSpeedEngine(whole, build_plan(whole, config), config, device)
    from zpp_lab.engines.virtual import VirtualEngine

    if config.engine.deterministic:  # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = _model(config, vocab_size, str(device))
    return VirtualEngine(model, build_plan(model, config), config)


def check_engine(config: Config) -> None:
    """ValueError where recipe and cluster do not go together, or the engine has no such recipe.
    Builds no model."""
    recipe = recipe_of(config)
    if config.engine.name == "virtual" and config.recipe.shard == "node":
        raise ValueError(
            "recipe.shard=node runs on engine=fsdp alone; for the virtual engine take "
            "recipe.hops=2 without codecs, which adds up in the same groups"
        )
    if config.engine.name == "fsdp":
        is_untouched(Plan((), recipe), config.engine.ordered)
    if config.engine.name == "deepspeed":
        from zpp_lab.engines.deepspeed_settings import deepspeed_settings

        deepspeed_settings(config)


def recipe_of(config: Config) -> Recipe:
    """The recipe on the configured cluster, checked; ValueError names what does not fit."""
    sent = DTYPES[config.train.param_dtype], DTYPES[config.train.reduce_dtype]
    return Recipe(config.recipe, config.cluster, *sent, lora=config.model.lora)


def _model(config: Config, vocab_size: int, device: str) -> Any:
    model = build_model(config.model, vocab_size, device=device, seed=config.seed)
    if config.engine.compile:
        from zpp_lab.engines.compiled import compile_units  # loads the compiler

        compile_units(model.units(), config.engine.deterministic)
    return model


def build_plan(model: nn.Module, config: Config) -> Plan:
    """The recipe's data movement for this model on the configured cluster."""
    train, recipe = config.train, recipe_of(config)
    return Plan.build(
        units_of(model, recipe.shards),
        recipe,
        micro_steps=train.micro_steps,
        accumulate=train.accumulate,
        gather=config.engine.gather,
    )


def units_of(model: nn.Module, shards: int) -> list[Unit]:
    """The model's units: `model.units()`, then the root with what is left."""
    return cut_units(model, named_units(model), shards, frozen_base(model))
