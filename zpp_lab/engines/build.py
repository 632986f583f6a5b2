"""From a config to an engine: device, model, units, recipe, plan."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from zpp_lab.collectives.plan import Plan, Unit
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import ClusterConfig, Config, EngineConfig, RecipeConfig
from zpp_lab.data.tokenizer import open_outside
from zpp_lab.engines.base import Engine
from zpp_lab.engines.units import cut_units, named_units
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
        raise ValueError("engine.device=cuda, but torch finds no GPU: use engine.device=cpu")
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
        from zpp_lab.engines.fsdp.engine import FsdpEngine

        model = _model(config, vocab_size, "meta")
        return FsdpEngine(model, build_plan(model, config), config, device)
    if config.engine.name == "deepspeed":
        from zpp_lab.engines.deepspeed.engine import DeepSpeedEngine

        whole = build_model(config.model, vocab_size, device=device, seed=config.seed)
        return DeepSpeedEngine(whole, build_plan(whole, config), config, device)
    from zpp_lab.engines.virtual.engine import VirtualEngine

    if config.engine.deterministic:  # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = _model(config, vocab_size, str(device))
    return VirtualEngine(model, build_plan(model, config), config)


def check_axes(config: Config) -> None:
    """ValueError for tensor parts and stages, which no engine and no plan has yet."""
    for name in ("tp", "pp"):
        if (size := getattr(config.cluster, name)) > 1:
            raise ValueError(
                f"cluster.{name}={size}: models are not cut into parts or stages yet: use "
                f"cluster.{name}=1"
            )


def check_engine(config: Config) -> None:
    """ValueError where recipe and cluster do not go together, or the engine has no such recipe.
    Builds no model."""
    check_axes(config)
    for phase in config.phases:
        Recipe.of(phase.config)
    if config.engine.name == "deepspeed":
        from zpp_lab.engines.deepspeed.settings import deepspeed_settings

        deepspeed_settings(config)


def _model(config: Config, vocab_size: int, device: str) -> Any:
    model = build_model(config.model, vocab_size, device=device, seed=config.seed)
    if config.engine.compile:
        from zpp_lab.engines.compile import compile_units  # loads the compiler

        compile_units(model.units(), config.engine.deterministic)
    return model


def build_plan(model: nn.Module, config: Config, rollouts: bool = False) -> Plan:
    """The recipe's data movement for this model on the configured cluster; with `rollouts` for
    generation too."""
    check_axes(config)
    train, recipe = config.train, Recipe.of(config)
    return Plan.build(
        units_of(model, recipe.shards, config.engine.blocks_per_unit),
        recipe,
        micro_steps=train.micro_steps,
        accumulate=train.accumulate,
        gather=config.engine.gather,
        rollouts=rollouts or config.task == "rl",
    )


def units_of(model: nn.Module, shards: int, blocks_per_unit: int) -> list[Unit]:
    """The model's units: blocks of `model.units()`, then the root with what is left."""
    return cut_units(model, named_units(model, blocks_per_unit), shards, frozen_base(model))


def vocabulary(config: Config) -> int:
    """Of the model, without reading the corpus: a BPE has as many tokens as it was asked for."""
    if config.data.tokenizer == "hf":
        tokens = open_outside(config.data).vocab_size
    else:
        tokens = config.data.vocab_size if config.data.tokenizer == "bpe" else 256
    return max(tokens, config.model.vocab_size)


def plan_of(config: Config) -> Plan:
    """What `config` moves. Plans are kept: the next prediction with the same model, recipe and
    cluster takes milliseconds."""
    check_axes(config)
    train, groups = config.train, (config.model, config.recipe, config.cluster)
    settings = (train.param_dtype, train.reduce_dtype, train.micro_steps, train.accumulate)
    return _plan(
        *(json.dumps(asdict(group)) for group in groups),
        vocabulary(config),
        config.engine.gather,
        config.engine.blocks_per_unit,
        *settings,
        config.task == "rl",
    )


def plans_of(config: Config) -> list[tuple[int, Plan]]:
    """The plan of each of the run's phases, with their steps."""
    return [(phase.steps, plan_of(phase.config)) for phase in config.phases]


@lru_cache(maxsize=256)
def _plan(
    model: str,
    recipe: str,
    cluster: str,
    vocab: int,
    gather: str,
    blocks_per_unit: int,
    param_dtype: str,
    reduce_dtype: str,
    micro_steps: int,
    accumulate: str,
    rollouts: bool,
) -> Plan:
    """Groups of a config as JSON, which can be compared."""
    made = Recipe(
        load(RecipeConfig, json.loads(recipe)),
        load(ClusterConfig, json.loads(cluster)),
        DTYPES[param_dtype],
        DTYPES[reduce_dtype],
        load(ModelConfig, json.loads(model)).lora,
    )
    units = _units(model, vocab, made.shards, blocks_per_unit)
    how: Any = {"micro_steps": micro_steps, "accumulate": accumulate, "rollouts": rollouts}
    return Plan.build(units, made, **how, gather=gather)


@lru_cache(maxsize=64)
def _units(model: str, vocab: int, shards: int, blocks_per_unit: int) -> tuple[Unit, ...]:
    """`model`: a ModelConfig as JSON."""
    settings = load(ModelConfig, json.loads(model))
    return tuple(units_of(build_model(settings, vocab, "meta"), shards, blocks_per_unit))
