"""What a finished study allows: recipes whose loss it has shown to stay within a limit.

The limit is a share of the baseline's held-out loss. A recipe is allowed when the study, judged
with that limit as its margin, finds its arm on par or better (by the study's own paired tests,
corrected for looks and for the number of arms), and the upper end of the interval of its gap is
below the limit. Where several arms train alike, all of them must be. What no arm measured is not
allowed, but for plain ZeRO-3, which the others are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zpp_lab.config import WIRES, Config, RecipeConfig, StudyConfig, Wire, load
from zpp_lab.search.sameness import Numbers
from zpp_lab.study.result import read_result
from zpp_lab.study.states import NO_ANSWER, NOT_JUDGED
from zpp_lab.study.table import gap_text
from zpp_lab.study.verdict import ArmResult, StudyResult, judge_study

# Where no study says more: the bits of ZeRO++ as published.
LEAST_BITS: dict[Wire, int] = {wire: 8 if wire.startswith("weights") else 4 for wire in WIRES}
Kind = Literal["allowed", "loss", "not measured"]


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
        """Of all arms that have a verdict, controls apart."""
        return [m.config.recipe for m in self.measured if m.arm.arm.role == "arm"]

    @property
    def waiting(self) -> list[str]:
        """Controls that have no answer yet."""
        return [c.arm for c in self.result.controls if not c.ok]

    def rule(self, numbers: Numbers) -> Ruling:
        """What the study says of a plan."""
        if numbers.raw:
            return Ruling("allowed", "no codec: only the order of sums differs")
        found = [m for m in self.measured if m.numbers.covers(numbers)]
        if found:
            return max((self._judge(m.arm) for m in found), key=lambda r: r.kind == "loss")
        for m in self.measured:
            if m.arm.verdict in ("worse", "diverged") and numbers.coarser(m.numbers):
                why = f"coarser than {m.arm.name}, which {_verdict(m.arm)}"
                return Ruling("loss", why, m.arm.name)
        return Ruling("not measured", "no arm of the study trains so")

    def _judge(self, arm: ArmResult) -> Ruling:
        name = arm.name
        if arm.verdict == "baseline":
            return Ruling("allowed", f"{name}, the study's baseline", name)
        text = f"{name} {_verdict(arm)}, gap {gap_text(arm)} nats"
        if arm.gap is None or arm.margin is None:
            return Ruling("loss", f"{name} {_verdict(arm)}", name)
        limit = f"{arm.margin:.4f}"
        if arm.verdict in ("on par", "better"):
            high = arm.gap.interval[1] if arm.gap.interval else float("inf")
            if high < arm.margin:
                return Ruling("allowed", text, name)
            return Ruling("loss", f"{text}: up to {high:+.4f}, limit {limit}", name)
        if arm.verdict == "undecided" and self.undecided and arm.gap.mean < arm.margin:
            return Ruling("allowed", f"{text}: allowed by --allow undecided", name)
        return Ruling("loss", f"{text}, limit {limit}", name)


def without_evidence(recipe: RecipeConfig) -> Ruling:
    """What is allowed where no study is at hand: `LEAST_BITS` or more on each wire, and codecs of
    the family `block` alone."""
    fewer = [wire for wire in WIRES if _fewer(recipe, wire)]
    if not fewer:
        return UNLIMITED
    why = f"{' and '.join(fewer)}: fewer than 8 bits for weights or 4 for gradients"
    return Ruling("not measured", f"{why}, or a codec of another package, without a study")


def _fewer(recipe: RecipeConfig, wire: Wire) -> bool:
    own = recipe.wire(wire)
    rules = [r.set.over(own) for r in recipe.rules if wire in r.wires and not r.exempt]
    return any(
        settings.codec not in (None, "none", "block") or (settings.bits or 16) < LEAST_BITS[wire]
        for settings in (own, *rules)
    )


def read_limit(folder: Path, max_gap: float | None = None, undecided: bool = False) -> LossLimit:
    """The limit that the study below `folder` sets. max_gap: None takes the study's own margin.

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
    wrong = [c for c in result.controls if not c.ok and c.verdict not in (*NO_ANSWER, "undecided")]
    if wrong:
        raise ValueError(
            f"{folder}: {wrong[0].text} Its verdicts say nothing until that is explained; take "
            "another study, or leave --study out"
        )


def _measured(folder: Path, arm: ArmResult) -> Measured | None:
    if arm.verdict in NO_ANSWER or arm.first_run is None:
        return None
    try:
        config = load(Config, arm.first_run.config)
        return Measured(arm, config, Numbers.of(config))
    except ValueError as error:
        raise ValueError(
            f"{folder}: arm {arm.name}'s settings are not known here ({error}); was it run by "
            "another version, or with a codec that is not installed?"
        ) from None


def _verdict(arm: ArmResult) -> str:
    return "diverged" if arm.verdict == "diverged" else f"is {arm.text}"
