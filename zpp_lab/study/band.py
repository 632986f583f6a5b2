"""The noise band: how far a run strays when nothing but the order of its sums has changed.

A study with one seed has no test and no interval. Its order control says at least what nothing
looks like: an arm whose gap is no larger shows nothing, one far beyond it shows something. One draw
of the noise is little; several seeds have a noise floor of their own (`noise.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zpp_lab.study.runs import Run, read_metrics
from zpp_lab.study.verdict import ArmResult, StudyResult

Points = Mapping[int, float]  # step → gap in nats
Row = dict[str, Any]
_NEAR = 10  # a training loss's band at a step: the largest within this part of the run, up to it


@dataclass(frozen=True)
class Beside:
    """A gap beside a noise band of ±noise, both in nats."""

    gap: float
    noise: float

    @property
    def side(self) -> str:
        """inside, above (a higher loss than the baseline's) or below (a lower one)."""
        if abs(self.gap) <= self.noise:
            return "inside"
        return "above" if self.gap > 0 else "below"

    @property
    def factor(self) -> float:
        """The gap, without its sign, in units of the band."""
        return abs(self.gap) / self.noise

    @property
    def text(self) -> str:
        """Such as "below, 1.5×"."""
        return f"{self.side}, {self.times}"

    @property
    def times(self) -> str:
        return f"{self.factor:,.1f}×" if self.factor < 100 else f"{self.factor:,.0f}×"


def one_seed(result: StudyResult) -> bool:
    """Whether no baseline has more than one finished run: nothing can be tested."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline"]
    return bool(bases) and all(len(base.finished) == 1 for base in bases)


def noise_bands(result: StudyResult) -> dict[str, float]:
    """The noise of each baseline that has an order control which moved at all, by its name."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline"]
    return {base.name: noise for base in bases if (noise := noise_of(result, base))}


def beside(result: StudyResult, arm: ArmResult, bands: Mapping[str, float]) -> Beside | None:
    """Where the arm's mean gap lies; None for a baseline, without a gap or without a band."""
    noise = bands.get(result.baseline_of(arm).name)
    if noise is None or arm.gap is None or arm.verdict == "baseline":
        return None
    return Beside(arm.gap.mean, noise)


def noise_of(result: StudyResult, base: ArmResult) -> float | None:
    """The largest held-out gap of the order controls of `base` in the second half of training, in
    nats; None without one. The last gap alone would be 0 wherever two curves happen to cross."""
    gaps = [
        abs(gap)
        for arm in result.arms
        if arm.arm.role == "order_control" and result.baseline_of(arm).name == base.name
        for seed, last in arm.gaps.items()
        for gap in (last, *_late_gaps(arm.runs[seed], base.runs[seed]))
    ]
    return max(gaps, default=None)


def _late_gaps(run: Run, base: Run) -> list[float]:
    """At the evaluations of the second half, where both losses are finite."""
    mine, theirs = (_evaluations(read_metrics(one.dir)) for one in (run, base))
    last = max(mine, default=0)
    both = [step for step in mine if step in theirs and 2 * step > last]
    return [gap for step in both if math.isfinite(gap := mine[step] - theirs[step])]


def _evaluations(rows: Sequence[Row]) -> dict[int, float]:
    return {row["step"]: row["heldout_loss"] for row in rows if row.get("heldout_loss") is not None}


# ---------------------------------------------------------------------- over training


def training_band(controls: Sequence[Points], points: Iterable[int]) -> list[Row]:
    """± the largest gap of the controls at each of `points` and just before; [] without controls.

    One step's gap crosses 0 now and then, which is no sign of less noise; and nothing after a step
    counts, so that the band opens where the controls part from their baseline.
    """
    steps = [step for run in controls for step in run]
    reach = max(1, max(steps, default=0) // _NEAR)
    return _rows({at: _largest(controls, at - reach, at) for at in sorted(points)})


def heldout_band(controls: Sequence[Points], points: Iterable[int]) -> list[Row]:
    """± the largest gap of the controls at each of `points`, which are evaluations."""
    return _rows({at: _largest(controls, at, at) for at in sorted(points)})


def _largest(controls: Sequence[Points], first: int, last: int) -> float | None:
    found = [abs(run[step]) for run in controls for step in range(first, last + 1) if step in run]
    return max(found, default=None)


def _rows(found: Mapping[int, float | None]) -> list[Row]:
    return [{"step": s, "low": -v, "high": v} for s, v in found.items() if v is not None]
