"""The quiet part of training: the steps before noise takes over, where an arm's gap is its own.

Two runs that differ only in the order of their sums stay together for a while; then some batch
parts them, and from there on every gap is mostly noise. Up to that step the order control says that
nothing else moves the loss, so what an arm's gap holds there comes from its recipe. That says
little of the end of training, but it is exact where a verdict would take many seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from zpp_lab.study.runs import Run, read_metrics
from zpp_lab.study.table import signed
from zpp_lab.study.verdict import ArmResult, StudyResult

SHARE = 0.01  # of the margin: an order control's gap up to that counts as nothing
FEWEST = 8  # steps; a shorter part says nothing


@dataclass(frozen=True)
class QuietArm:
    """Gaps of the training loss in nats, over all steps of the quiet part and all seeds."""

    arm: str
    mean: float
    largest: float  # without its sign

    @property
    def text(self) -> str:
        return f"{signed(self.mean)}, at most {self.largest:.4f}"


@dataclass(frozen=True)
class Quiet:
    """One baseline's quiet part: steps 1 to `end`, in which no order control's gap is over `limit`.

    whole: no step parted them. noise: the order controls' largest gap in it, nats.
    """

    baseline: str
    controls: Sequence[str]
    end: int
    whole: bool
    limit: float
    noise: float
    arms: Sequence[QuietArm]

    @property
    def text(self) -> str:
        """A sentence for a report."""
        names = " and ".join(self.controls)
        until = f"In all {self.end} steps" if self.whole else f"Up to step {self.end}"
        return (
            f"{until} the training loss of {names} is within {self.noise:.1e} nats of "
            f"{self.baseline}'s: the quiet part, in which it stays within {SHARE:.0%} of the "
            f"margin ({self.limit:.1e}). Gaps there (means and largest amounts over steps and "
            "seeds) come from what an arm rounds, not from the order of sums. They say what a "
            "recipe does at the beginning, nothing of the end."
        )


def quiet_parts(result: StudyResult) -> list[Quiet]:
    """One for each baseline that has an order control and a quiet part of FEWEST steps or more."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline" and arm.margin]
    return [part for base in bases if (part := _part(result, base)) is not None]


def _part(result: StudyResult, base: ArmResult) -> Quiet | None:
    of_base = [
        arm
        for arm in result.arms
        if arm.verdict != "baseline" and result.baseline_of(arm).name == base.name
    ]
    theirs = {seed: _losses(run) for seed, run in base.runs.items()}
    controls = {a.name: _gaps(a, theirs) for a in of_base if a.arm.role == "order_control"}
    runs = [run for found in controls.values() for run in found]
    if not runs:
        return None
    assert base.margin is not None
    limit = SHARE * base.margin
    end = min(_first_beyond(run, limit) for run in runs)
    if end < FEWEST:
        return None
    noise = max(abs(gap) for run in runs for gap in run[:end])
    names = [name for name, found in controls.items() if found]
    arms = [_arm(a.name, found) for a in of_base if (found := _gaps(a, theirs, end))]
    return Quiet(base.name, names, end, end == max(map(len, runs)), limit, noise, arms)


def _gaps(
    arm: ArmResult, theirs: Mapping[int, Sequence[float]], end: int | None = None
) -> list[list[float]]:
    """For each seed of the verdict, or each that has begun while none has ended: the training
    loss's gap of steps 1, 2 … in order, up to `end`."""
    runs = {seed: arm.runs[seed] for seed in arm.gaps} or arm.runs
    both = [
        zip(_losses(run), theirs[seed], strict=False)
        for seed, run in runs.items()
        if seed in theirs
    ]
    found = [[mine - other for mine, other in pairs][:end] for pairs in both]
    return [gaps for gaps in found if gaps]


def _losses(run: Run) -> list[float]:
    """Of steps 1, 2 … without a hole; ends before a loss that is not finite."""
    found: list[float] = []
    for row in read_metrics(run.dir):
        if row["step"] != len(found) + 1 or not math.isfinite(row["loss"]):
            break
        found.append(row["loss"])
    return found


def _first_beyond(run: Sequence[float], limit: float) -> int:
    """How many steps come before the first gap over `limit`."""
    return next((i for i, gap in enumerate(run) if abs(gap) > limit), len(run))


def _arm(name: str, runs: Sequence[Sequence[float]]) -> QuietArm:
    gaps = [gap for run in runs for gap in run]
    return QuietArm(name, fmean(gaps), max(map(abs, gaps)))
