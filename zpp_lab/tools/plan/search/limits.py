"""What a finished study allows: recipes whose loss it has shown to stay within a limit.

The limit is a share of the baseline's held-out loss. A recipe is allowed when the study, judged
with that limit as margin, finds all its arms inside the margin or below 0, and the upper end of the
interval is below the limit. Unmeasured recipes are not allowed, except plain ZeRO-3.

Two plans train the same when they have the same `Numbers`: their steps differ in the order of sums
alone. So the stage, the sharding, the secondary partition, activation checkpointing and hops of raw
gradients may differ; a codec, a hop that encodes gradients, and the optimizer's bits may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from zpp_lab.codecs import BlockCodec, Codec, RawCodec, build_codec
from zpp_lab.collectives.recipe import Recipe, quantizes_any
from zpp_lab.config.flat import stored_config
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.config.study import StudyConfig
from zpp_lab.config.wires import GATHERS, INTRA, UPDATE, WIRES, Wire
from zpp_lab.runs.reader import NO_ANSWER, NOT_JUDGED
from zpp_lab.study.judge.claims import GOOD, OPEN, WORSE
from zpp_lab.study.judge.verdict import ArmResult, StudyResult, judge_study, read_result
from zpp_lab.study.words import gap_text

STATES = ("fp32", "bf16", "8bit")  # of the optimizer, coarser to the right
Kind = Literal["allowed", "loss", "not measured"]


@dataclass(frozen=True)
class Numbers:
    """What of a plan can change the loss. None and absent hops: raw."""

    weights: tuple[Codec | None, Codec | None]  # forward, backward
    grads: tuple[tuple[str, Codec], ...]  # each encoding on a gradient's way, by hop
    drawn_again: bool  # weights are rounded at random, and again for backward
    summed_first: bool  # several micro-steps' gradients are encoded once
    but: str  # exemptions, rules and phases, and what encoders remember
    optimizer_state: str
    update: tuple[Codec | None, str] = (None, "")  # of weights that nodes keep, and as what
    hops: int = field(default=0, compare=False)  # of a gradient, raw ones too

    @classmethod
    def of(cls, config: Config) -> Numbers:
        recipe = Recipe(config.recipe, config.cluster.dp, lora=config.model.lora)
        settings, train = config.recipe, config.train
        same = settings.secondary or not settings.again
        forward, backward = (_codec(recipe, w) for w in GATHERS)
        pair = (forward, forward if same else backward)
        grads = tuple((_hop(recipe, w), c) for w in recipe.hops if (c := _codec(recipe, w)))
        last = train.accumulate == "last" or settings.parts[1] == "none"
        several = bool(grads) and not last and train.micro_steps > 1
        return cls(
            weights=pair,
            grads=grads,
            drawn_again=not same and any(c is not None and c.stochastic for c in pair),
            summed_first=bool(grads) and last and train.micro_steps > 1,
            but=f"{settings.exempt} {settings.rules}{_remembered(recipe)}{settings.phases or ''}"
            f"{' sums in the node' if several and recipe.node_sums else ''}"
            if quantizes_any(recipe) or settings.phases
            else "",
            optimizer_state=train.optimizer_state,
            update=_update(recipe),
            hops=len(recipe.hops),
        )

    @property
    def raw(self) -> bool:
        """Whether nothing but the order of sums differs from plain ZeRO-3."""
        return self == PLAIN

    def covers(self, other: Numbers) -> bool:
        """Return whether a study of this says how `other` trains: it encodes the same, or `other`
        lacks a hop (its cluster has one less) and is the same on the one that it has."""
        if self.weights != other.weights:  # most often so
            return False
        same = replace(self, grads=()) == replace(other, grads=())
        mine, theirs = ([codec for _, codec in n.grads] for n in (self, other))
        fewer = other.hops == 1 and len(theirs) == 1 and other.grads[0] in self.grads
        return same and (mine == theirs or fewer)

    def coarser(self, other: Numbers) -> bool:
        """Return whether this has at most `other`'s bits wherever that encodes, all else alike."""
        own, theirs = dict(self.grads), dict(other.grads)
        own_way, way = ((n.but, n.drawn_again, n.update) for n in (self, other))
        alike = own_way == way
        first = not theirs or self.summed_first == other.summed_first
        return (
            alike
            and first
            and STATES.index(self.optimizer_state) >= STATES.index(other.optimizer_state)
            and all(map(_at_most, self.weights, other.weights))
            and all(_at_most(_on(own, hop), codec) for hop, codec in theirs.items())
        )


PLAIN = Numbers((None, None), (), False, False, "", "fp32")


def _codec(recipe: Recipe, wire: Wire) -> Codec | None:
    if recipe.cluster.world == 1:
        return None
    codec = build_codec(recipe.wire(wire), torch.float32)
    return None if isinstance(codec, RawCodec) else codec


def _remembered(recipe: Recipe) -> str:
    """Of each hop that has a memory; "" of none."""
    return "".join(f" {w} {recipe.wire(w).memory}" for w in recipe.hops if recipe.remembers(w))


def _update(recipe: Recipe) -> tuple[Codec | None, str]:
    """What the update does to weights: nothing where they travel as they are."""
    codec = _codec(recipe, UPDATE) if recipe.kept else None
    return (codec, recipe.config.sharding.update) if codec else (None, "")


def _hop(recipe: Recipe, wire: Wire) -> str:
    """The wire, or that one hop crosses both."""
    several = recipe.cluster.nodes > 1 and recipe.cluster.gpus_per_node > 1
    return wire if len(recipe.hops) > 1 or not several else "both"


def _on(grads: dict[str, Codec], hop: str) -> Codec | None:
    """The encoding on `hop`. The first of two hops is to each gradient what one hop would be."""
    return grads.get(hop) or (grads.get(INTRA) if hop == "both" else None)


def _at_most(one: Codec | None, other: Codec | None) -> bool:
    if one == other or other is None:
        return True
    if not isinstance(one, BlockCodec) or type(one) is not type(other):
        return False
    assert isinstance(other, BlockCodec)
    return one.bits <= other.bits and replace(one, bits=other.bits) == other


@dataclass(frozen=True)
class Ruling:
    """Whether a plan's loss is within the limit, and why. `arm`: whose runs say so."""

    kind: Kind
    why: str
    arm: str | None = None


UNLIMITED = Ruling("allowed", "loss was not considered")


@dataclass(frozen=True)
class Measured:
    """An arm with a verdict within the limit, and how it trained."""

    arm: ArmResult
    config: Config
    numbers: Numbers


@dataclass(frozen=True)
class LossLimit:
    """A study's word on plans. `share`: of the baseline's loss. `undecided`: allow those too."""

    folder: Path
    result: StudyResult  # judged with the limit as its margin
    share: float
    undecided: bool
    measured: Sequence[Measured]

    @property
    def study(self) -> StudyConfig:
        return self.result.study

    @property
    def recipes(self) -> list[RecipeConfig]:
        """The recipes of judged arms, without controls and recipes in phases."""
        arms = [m.config.recipe for m in self.measured if m.arm.arm.role == "arm"]
        return [recipe for recipe in arms if not recipe.phases]

    @property
    def waiting(self) -> list[str]:
        """Controls that have no answer yet."""
        return [c.arm for c in self.result.controls if not c.ok]

    def rule(self, numbers: Numbers) -> Ruling:
        """Return what the study says of a plan."""
        if numbers.raw:
            return Ruling("allowed", "no codec: only the order of sums differs")
        found = [m for m in self.measured if m.numbers.covers(numbers)]
        if found:
            return max((self._judge(m.arm) for m in found), key=lambda r: r.kind == "loss")
        for m in self.measured:
            if m.arm.verdict in (WORSE, "diverged") and numbers.coarser(m.numbers):
                why = f"coarser than {m.arm.name}, which {_verdict(m.arm)}"
                return Ruling("loss", why, m.arm.name)
        return Ruling("not measured", "no arm of the study uses these settings")

    def _judge(self, arm: ArmResult) -> Ruling:
        name = arm.name
        if arm.verdict == "baseline":
            return Ruling("allowed", f"{name}, the study's baseline", name)
        text = f"{name} {_verdict(arm)}, gap {gap_text(arm)} nats"
        if arm.gap is None or arm.margin is None:
            return Ruling("loss", f"{name} {_verdict(arm)}", name)
        limit = f"{arm.margin:.4f}"
        if arm.verdict in GOOD:
            high = arm.gap.interval[1] if arm.gap.interval else float("inf")
            if high < arm.margin:
                return Ruling("allowed", text, name)
            return Ruling("loss", f"{text}: up to {high:+.4f}, limit {limit}", name)
        if arm.verdict in OPEN and self.undecided and arm.gap.mean < arm.margin:
            return Ruling("allowed", f"{text}: allowed by --allow undecided", name)
        return Ruling("loss", f"{text}, limit {limit}", name)


def without_evidence(recipe: RecipeConfig) -> Ruling:
    """Return what is allowed without a study: block codecs of `least_bits` or more."""
    fewer = [wire for wire in recipe.wires if _fewer(recipe, wire)]
    if not fewer:
        return UNLIMITED
    why = f"{' and '.join(fewer)}: fewer than 8 bits for weights or 4 for gradients"
    return Ruling("not measured", f"{why}, or another codec than block, without a study")


def _fewer(recipe: RecipeConfig, wire: Wire) -> bool:
    own = recipe.wire(wire)
    rules = [r.set.over(own) for r in recipe.rules if r.holds_on(wire) and not r.exempt]
    least = WIRES[wire].least_bits
    return any(
        settings.codec not in (None, "none", "block") or (settings.bits or 16) < least
        for settings in (own, *rules)
    )


def read_limit(folder: Path, max_gap: float | None = None, undecided: bool = False) -> LossLimit:
    """Return the limit that the study below `folder` sets. max_gap: None takes the study's own
    margin.

    ValueError when there are no runs or no verdicts, or when a control came out wrong.
    """
    if max_gap is not None and not 0 < max_gap < 1:
        raise ValueError(
            f"--max-gap {max_gap:g}: a share of the baseline's loss, such as 0.01 for 1 %"
        )
    own = read_result(folder)
    _check(folder, own)
    share = own.study.margin if max_gap is None else max_gap
    result = judge_study(replace(own.study, margin=share), own.runs)
    measured = [m for arm in result.arms if (m := _measured(folder, arm))]
    return LossLimit(folder, result, share, undecided, measured)


def _check(folder: Path, result: StudyResult) -> None:
    """Controls are asked with the study's own margin, which they were planned for."""
    judged = [a for a in result.arms if a.verdict not in (*NO_ANSWER, "baseline")]
    if result.margin is None or not judged:
        what = "its baseline has no finished run" if result.margin is None else "no arm has one"
        what = next((a.text for a in result.arms if a.verdict == NOT_JUDGED), what)
        raise ValueError(
            f"{folder}: no verdicts yet ({what}); finish the study with `zpp-lab study "
            f"{result.study.name} --dir {folder}`, or leave --study out"
        )
    wrong = [c for c in result.controls if c.wrong]
    if wrong:
        raise ValueError(
            f"{folder}: {wrong[0].text} Its verdicts are invalid until that is explained; use "
            "another study, or leave --study out"
        )


def _measured(folder: Path, arm: ArmResult) -> Measured | None:
    if arm.verdict in NO_ANSWER or arm.first_run is None:
        return None
    try:
        config = stored_config(arm.first_run.config)
        return Measured(arm, config, Numbers.of(config))
    except ValueError as error:
        raise ValueError(
            f"{folder}: arm {arm.name}'s settings are unknown to this version ({error}): use the "
            "version that ran it, or install its codec"
        ) from None


def _verdict(arm: ArmResult) -> str:
    return "diverged" if arm.verdict == "diverged" else f"is {arm.text}"
