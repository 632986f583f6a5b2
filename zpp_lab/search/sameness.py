"""Which plans train the same model: what of a recipe changes numbers, and what only moves them.

Two plans are the same here when their steps differ in the order of sums alone: the stage, the
sharding, the secondary partition (it keeps the forward's weights, which rounding to nearest would
make again), activation checkpointing, and hops that carry raw gradients. Not the same: another
codec on any wire, gradients encoded on another hop, moments of the optimizer in fewer bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from zpp_lab.codecs import BlockCodec, Codec, RawCodec, build_codec
from zpp_lab.collectives.recipe import Recipe, quantizes_any
from zpp_lab.config import Config, Wire

STATES = ("fp32", "bf16", "8bit")  # of the optimizer, coarser to the right


@dataclass(frozen=True)
class Numbers:
    """What of a plan can change the loss. None and absent hops: raw."""

    weights: tuple[Codec | None, Codec | None]  # forward, backward
    grads: tuple[tuple[str, Codec], ...]  # each encoding on a gradient's way, by hop
    drawn_again: bool  # weights are rounded at random, and anew for backward
    summed_first: bool  # several micro-steps' gradients are encoded once
    but: str  # exemptions and rules
    optimizer_state: str
    hops: int = field(default=0, compare=False)  # of a gradient, raw ones too

    @classmethod
    def of(cls, config: Config) -> Numbers:
        recipe = Recipe(config.recipe, config.cluster, lora=config.model.lora)
        settings, train = config.recipe, config.train
        kept = settings.secondary or settings.stage != 3
        forward, backward = (_codec(recipe, w) for w in ("weights_forward", "weights_backward"))
        pair = (forward, forward if kept else backward)
        grads = tuple((_hop(recipe, w), c) for w in recipe.hops if (c := _codec(recipe, w)))
        last = train.accumulate == "last" or settings.stage == 1
        return cls(
            weights=pair,
            grads=grads,
            drawn_again=not kept and any(c is not None and c.stochastic for c in pair),
            summed_first=bool(grads) and last and train.micro_steps > 1,
            but=f"{settings.exempt} {settings.rules}" if quantizes_any(recipe) else "",
            optimizer_state=train.optimizer_state,
            hops=len(recipe.hops),
        )

    @property
    def raw(self) -> bool:
        """Whether nothing but the order of sums differs from plain ZeRO-3."""
        return self == PLAIN

    def covers(self, other: Numbers) -> bool:
        """Whether a study of this says how `other` trains: it encodes the same, or `other` lacks
        a hop (its cluster has one less) and is the same on the one that it has."""
        if self.weights != other.weights:  # most often so
            return False
        same = replace(self, grads=()) == replace(other, grads=())
        mine, theirs = ([codec for _, codec in n.grads] for n in (self, other))
        fewer = other.hops == 1 and len(theirs) == 1 and other.grads[0] in self.grads
        return same and (mine == theirs or fewer)

    def coarser(self, other: Numbers) -> bool:
        """Whether this has at most `other`'s bits wherever that encodes, all else alike."""
        own, theirs = dict(self.grads), dict(other.grads)
        alike = (self.but, self.drawn_again) == (other.but, other.drawn_again)
        first = not theirs or self.summed_first == other.summed_first
        return (
            alike
            and first
            and STATES.index(self.optimizer_state) >= STATES.index(other.optimizer_state)
            and all(map(_at_most, self.weights, other.weights))
            and all(_at_most(_on(own, hop), codec) for hop, codec in theirs.items())
        )


PLAIN = Numbers((None, None), (), False, False, "", "fp32")


def _codec(recipe: Recipe, wire: str) -> Codec | None:
    if recipe.cluster.world == 1:
        return None
    codec = build_codec(recipe.wire(wire), torch.float32)  # type: ignore[arg-type]
    return None if isinstance(codec, RawCodec) else codec


def _hop(recipe: Recipe, wire: Wire) -> str:
    """The wire, or that one hop crosses both."""
    several = recipe.cluster.nodes > 1 and recipe.cluster.gpus_per_node > 1
    return wire if len(recipe.hops) == 2 or not several else "both"


def _on(grads: dict[str, Codec], hop: str) -> Codec | None:
    """The encoding on `hop`. The first of two hops is to each gradient what one hop would be."""
    return grads.get(hop) or (grads.get("grads_intra") if hop == "both" else None)


def _at_most(one: Codec | None, other: Codec | None) -> bool:
    if one == other or other is None:
        return True
    if not isinstance(one, BlockCodec) or not isinstance(other, BlockCodec):
        return False
    return one.bits <= other.bits and replace(one, bits=other.bits) == other
