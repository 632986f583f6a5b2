"""A config's plan, and the work of its units: what a prediction of time starts from.

FLOPs count the matrix products of the built-in decoder: 2 for each weight and token, and causal
attention as flash attention computes it, half of the square.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

from zpp_lab.collectives.plan import Plan, Unit, UnitPlan
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config import ClusterConfig, Config, ModelConfig, RecipeConfig, load
from zpp_lab.data.outside_tokenizer import open_outside
from zpp_lab.engines.build import units_of
from zpp_lab.models import build_model


def vocabulary(config: Config) -> int:
    """Of the model, without reading the corpus: a BPE has as many tokens as it was asked for."""
    if config.data.tokenizer == "hf":
        tokens = open_outside(config.data).vocab_size
    else:
        tokens = config.data.vocab_size if config.data.tokenizer == "bpe" else 256
    return max(tokens, config.model.vocab_size)


def plan_of(config: Config, one_host: bool = False) -> Plan:
    """What `config` moves. Plans are kept: the next prediction with the same model, recipe and
    cluster takes milliseconds. one_host: the nodes are joined by the links of their GPUs, where
    engine.gather=auto is flat."""
    gather = config.engine.gather
    train, groups = config.train, (config.model, config.recipe, config.cluster)
    settings = (train.param_dtype, train.reduce_dtype, train.micro_steps, train.accumulate)
    return _plan(
        *(json.dumps(asdict(group)) for group in groups),
        vocabulary(config),
        "flat" if one_host and gather == "auto" else gather,
        *settings,
    )


@lru_cache(maxsize=256)
def _plan(
    model: str,
    recipe: str,
    cluster: str,
    vocab: int,
    gather: str,
    param_dtype: str,
    reduce_dtype: str,
    micro_steps: int,
    accumulate: str,
) -> Plan:
    """Groups of a config as JSON, which can be compared."""
    made = Recipe(
        load(RecipeConfig, json.loads(recipe)),
        load(ClusterConfig, json.loads(cluster)),
        DTYPES[param_dtype],
        DTYPES[reduce_dtype],
        load(ModelConfig, json.loads(model)).lora,
    )
    units = _units(model, vocab, made.shards)
    return Plan.build(units, made, micro_steps=micro_steps, accumulate=accumulate, gather=gather)


@lru_cache(maxsize=64)
def _units(model: str, vocab: int, shards: int) -> tuple[Unit, ...]:
    """`model`: a ModelConfig as JSON."""
    settings = load(ModelConfig, json.loads(model))
    return tuple(units_of(build_model(settings, vocab, "meta"), shards))


@dataclass(frozen=True)
class Work:
    """FLOPs of a block, or of the head, on one rank and micro-step. `backward` has no
    recomputation in it."""

    forward: float
    backward: float
    recompute: float


def block_work(unit: UnitPlan, config: Config) -> Work:
    """Of a decoder block. Frozen weights need no gradients of their own, inputs
    always do."""
    tokens = config.train.batch_size * config.data.seq_len
    matrices = [p for p in unit.unit.parameters if len(p.shape) > 1]
    every = sum(p.numel for p in matrices)
    trained = sum(p.numel for p in matrices if p.name in unit.unit.trainable)
    attention = 2 * config.data.seq_len * config.model.dim * tokens
    forward = 2.0 * every * tokens + attention
    backward = 2.0 * (every + trained) * tokens + 2 * attention
    return Work(forward, backward, forward if config.model.checkpoint_activations else 0.0)


def head_work(root: UnitPlan, config: Config, vocab: int) -> Work:
    """Of the last product. With model.loss_chunk its logits are made again in backward."""
    tokens = config.train.batch_size * config.data.seq_len
    forward = 2.0 * vocab * config.model.dim * tokens
    head = "embed.weight" if config.model.tied_head else "head.weight"
    trained = head in root.unit.trainable
    return Work(forward, forward * (1 + trained), forward if config.model.loss_chunk else 0.0)
