"""From a config to an engine: device, model, units, recipe, plan."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zpp_lab.collectives.acts import PartsPlan
from zpp_lab.collectives.pipe import PipePlan
from zpp_lab.collectives.plan import Plan, Unit
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import ClusterConfig, Config, EngineConfig, RecipeConfig
from zpp_lab.data.tokenizer import open_outside
from zpp_lab.engines.base import Engine
from zpp_lab.engines.units import cut_units, named_units
from zpp_lab.models import build_model, build_parts, param_class
from zpp_lab.models.lora import frozen_base
from zpp_lab.models.stages import build_stage, check_stages


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

        model = model_of(config, vocab_size, "meta", dist.get_rank())
        return FsdpEngine(model, build_plan(model, config), config, device)
    if config.engine.name == "deepspeed":
        from zpp_lab.engines.deepspeed.engine import DeepSpeedEngine

        whole = build_model(config.model, vocab_size, device=device, seed=config.seed)
        return DeepSpeedEngine(whole, build_plan(whole, config), config, device)
    from zpp_lab.engines.virtual.engine import VirtualEngine

    if config.engine.deterministic:  # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = model_of(config, vocab_size, str(device))
    return VirtualEngine(model, build_plan(model, config), config)


def check_axes(config: Config) -> None:
    """ValueError, naming the setting, for what stages and tensor parts do not have yet. `Config`
    itself refuses more."""
    cluster, engine, train = config.cluster, config.engine, config.train
    if not cluster.split:
        return
    length = config.data.seq_len
    for ok, what in (
        (engine.name != "deepspeed", "engine=deepspeed: use engine=fsdp"),
        (config.task == "text", f"task={config.task}: use task=text"),
        (
            not engine.compile or cluster.tp == 1 or config.model.name != "hf",
            "engine.compile=true with model=hf: use engine.compile=false",
        ),
        (not engine.offload, "engine.offload=true: use false"),
        (train.optimizer_state != "8bit", "train.optimizer_state=8bit: use fp32 or bf16"),
        (
            config.recipe.parts[2] != "none",
            f"recipe.{config.recipe.setting('optimizer')}: use node or world",
        ),
        (not config.recipe.remembers, "memory.kind=residual: leave it out"),
        (length % cluster.tp == 0, f"data.seq_len={length}: use a multiple of cluster.tp"),
    ):
        if not ok:
            raise ValueError(f"{cluster.split} is not built for {what}")
    if cluster.pp > 1:
        _check_pipe(config)


def _check_pipe(config: Config) -> None:
    """ValueError, naming the setting, for what has no stages."""
    pp, engine, train, recipe = config.cluster.pp, config.engine, config.train, config.recipe
    micros, name = train.micro_steps, f"engine.schedule={engine.schedule}"
    check_stages(config.model, pp, engine.chunks)
    for ok, what in (
        (
            not recipe.again,
            "recipe.stage=3: each micro-step would gather all weights again; "
            "use recipe.stage=2 or 1",
        ),
        (engine.blocks_per_unit == 1, f"engine.blocks_per_unit={engine.blocks_per_unit}: use 1"),
        (
            engine.schedule in ("gpipe", "1f1b_overlap") or micros >= pp,
            f"train.micro_steps={micros} with {name}, which needs one for each stage: use {pp} or "
            "more, or engine.schedule=gpipe or 1f1b_overlap",
        ),
        (
            engine.schedule != "interleaved" or micros % max(1, micros // pp) == 0,
            f"train.micro_steps={micros} with {name}: use a multiple of {pp}",
        ),
    ):
        if not ok:
            raise ValueError(f"cluster.pp={pp} is not built for {what}")


def check_engine(config: Config) -> None:
    """ValueError where recipe and cluster do not go together, or the engine has no such recipe.
    Builds no model."""
    check_axes(config)
    for phase in config.phases:
        Recipe.of(phase.config)
    if config.engine.name == "deepspeed":
        from zpp_lab.engines.deepspeed.settings import deepspeed_settings

        deepspeed_settings(config)


def model_of(config: Config, vocab_size: int, device: str, rank: int | None = None) -> Any:
    """Build the whole model, or what `rank` has of it; None: all tensor parts, joined."""
    if config.cluster.pp > 1 and rank is not None:
        cluster, place = config.cluster, config.cluster.place(rank)
        own, chunks = own_stages(cluster, config.engine.chunks)[place["pp"]], config.engine.chunks
        model: Any = build_stage(
            config.model, vocab_size, cluster.tp, place["tp"], own, cluster.pp * chunks
        )
    elif config.cluster.tp > 1:
        parts = build_parts(config.model, vocab_size, config.cluster.tp, device, config.seed)
        if rank is None:
            parts[0].join(parts, None)
        model = parts[0 if rank is None else config.cluster.place(rank)["tp"]]
    else:
        model = build_model(config.model, vocab_size, device=device, seed=config.seed)
    if config.engine.compile:
        from zpp_lab.engines.compile import compile_units  # loads the compiler

        lanes = getattr(model, "lanes", (model,))
        units = [unit for lane in lanes for unit in lane.units()]
        compile_units(units, config.engine.deterministic)
    return model


def build_plan(model: nn.Module, config: Config, rollouts: bool = False) -> Plan:
    """The recipe's data movement for this model on the configured cluster; with `rollouts` for
    generation too."""
    check_axes(config)
    train, recipe, engine = config.train, Recipe.of(config), config.engine
    units: Iterable[Unit]
    if config.cluster.pp > 1:  # stages have a root each
        each = (json.dumps(asdict(group)) for group in (config.model, config.cluster))
        units = _stages(*each, model.vocab_size, recipe.shards, engine.chunks)  # type: ignore[arg-type]
    else:
        units = units_of(model, recipe.shards, engine.blocks_per_unit)
    sizes = train.batch_size * config.data.seq_len, train.micro_steps
    return Plan.build(
        units,
        recipe,
        micro_steps=train.micro_steps,
        accumulate=train.accumulate,
        gather=config.engine.gather,
        rollouts=rollouts or config.task == "rl",
        parts=parts_plan(units, recipe, config.cluster.tp, *sizes),
        pipe=pipe_plan(recipe, config.cluster, engine.chunks, config.model, *sizes),
    )


def parts_plan(
    units: Iterable[Unit],
    recipe: Recipe,
    tp: int,
    tokens: int,
    micro_steps: int,
) -> PartsPlan | None:
    """Return what `tp` tensor parts of these units exchange with `tokens` a micro-batch; None of
    one."""
    if tp == 1:
        return None
    every = [p for unit in units for p in unit.parameters]
    shared = sum(p.shard_numel for p in every if p.parts == 1)
    dim = next(p.shape[-1] for p in every if param_class(p.name) == "embedding")
    blocks = sum(unit.blocks for unit in units)
    return PartsPlan(recipe, tp, tokens, dim, blocks, shared, micro_steps)


def pipe_plan(
    recipe: Recipe,
    cluster: ClusterConfig,
    chunks: int,
    model: ModelConfig,
    tokens: int,
    micro_steps: int,
) -> PipePlan | None:
    """Return what stages of `chunks` a rank send each other; None of one."""
    if cluster.pp == 1:
        return None
    numel, stages = tokens * model.dim // cluster.tp, cluster.pp * chunks
    return PipePlan(recipe, cluster.tp, stages, chunks, numel, micro_steps, cluster.across)


def own_stages(cluster: ClusterConfig, chunks: int) -> list[range]:
    """Return the stages of each place in a pipeline."""
    return [range(place, cluster.pp * chunks, cluster.pp) for place in range(cluster.pp)]


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
        train.batch_size * config.data.seq_len if config.cluster.split else 0,
        config.engine.chunks,
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
    tokens: int,
    chunks: int,
) -> Plan:
    """Groups of a config as JSON, which can be compared. tokens: of a micro-batch, where tensor
    parts or stages exchange them."""
    ranks, settings = load(ClusterConfig, json.loads(cluster)), load(ModelConfig, json.loads(model))
    made = Recipe(
        load(RecipeConfig, json.loads(recipe)),
        ranks.dp,
        DTYPES[param_dtype],
        DTYPES[reduce_dtype],
        settings.lora,
    )
    if ranks.pp > 1:
        units = _stages(model, cluster, vocab, made.shards, chunks)
    else:
        units = _units(model, vocab, made.shards, blocks_per_unit, ranks.tp)
    how: Any = {"micro_steps": micro_steps, "accumulate": accumulate, "rollouts": rollouts}
    how["parts"] = parts_plan(units, made, ranks.tp, tokens, micro_steps)
    how["pipe"] = pipe_plan(made, ranks, chunks, settings, tokens, micro_steps)
    return Plan.build(units, made, **how, gather=gather)


@lru_cache(maxsize=64)
def _units(model: str, vocab: int, shards: int, blocks_per_unit: int, tp: int) -> tuple[Unit, ...]:
    """`model`: a ModelConfig as JSON; with several tensor parts those of one."""
    settings = load(ModelConfig, json.loads(model))
    if tp > 1:
        return tuple(units_of(build_parts(settings, vocab, tp, "meta")[0], shards, blocks_per_unit))
    return tuple(units_of(build_model(settings, vocab, "meta"), shards, blocks_per_unit))


@lru_cache(maxsize=64)
def _stages(model: str, cluster: str, vocab: int, shards: int, chunks: int) -> tuple[Unit, ...]:
    """As `_units`, of all stages in turn."""
    settings, ranks = load(ModelConfig, json.loads(model)), load(ClusterConfig, json.loads(cluster))
    found: list[Unit] = []
    for place, own in enumerate(own_stages(ranks, chunks)):
        model_of = build_stage(settings, vocab, ranks.tp, 0, own, ranks.pp * chunks)
        found += (replace(unit, stage=place) for unit in units_of(model_of, shards, 1))
    return tuple(found)
