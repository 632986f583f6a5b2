"""The noise of a study: how large gaps are when nothing, or only the seed, has changed.

The noise floor needs several seeds. Two seeds of the baseline differ by initialization and data
order. An order control differs from the baseline in the order of its sums alone. Few bits can push
a run off its path; its loss then hardly follows the baseline's from seed to seed, and the gap holds
the noise of two runs (experiments/reference).

The noise band serves a study with one seed, which has no test and no interval: an arm whose gap is
no larger than its order control's shows nothing. It is one draw of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median, stdev, variance
from typing import Any

from scipy import special

from zpp_lab.runs.reader import Run, read_metrics
from zpp_lab.study.judge import stats
from zpp_lab.study.judge.claims import INSIDE, UNDECIDED
from zpp_lab.study.judge.verdict import ArmResult, StudyResult

Points = Mapping[int, float]  # step → gap in nats
Row = dict[str, Any]
_NEAR = 10  # a training loss's band at a step: the largest within this part of the run, up to it
NEAR = (*INSIDE, UNDECIDED)  # verdicts of arms whose gaps spread as an equal arm's do
PAIRED = 8  # seeds from which on it is told whether pairing by seed helps an arm


@dataclass(frozen=True)
class BandGap:
    """A gap next to a noise band of ±noise, both in nats."""

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
    """Return whether no baseline has more than one finished run: nothing can be tested."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline"]
    return bool(bases) and all(len(base.finished) == 1 for base in bases)


def noise_bands(result: StudyResult) -> dict[str, float]:
    """Return the noise of each baseline whose order control moved at all, by its name."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline"]
    return {base.name: noise for base in bases if (noise := noise_of(result, base))}


def band_gap(result: StudyResult, arm: ArmResult, bands: Mapping[str, float]) -> BandGap | None:
    """Compare the arm's mean gap with the noise band; None without a gap or a band."""
    noise = bands.get(result.baseline_of(arm).name)
    if noise is None or arm.gap is None or arm.verdict == "baseline":
        return None
    return BandGap(arm.gap.mean, noise)


def noise_of(result: StudyResult, base: ArmResult) -> float | None:
    """Return the largest held-out gap of the order controls of `base` in the second half of
    training, in nats; None without one. The last gap alone would be 0 wherever two curves happen to
    cross."""
    gaps = [
        abs(gap)
        for arm in result.arms
        if arm.arm.role == "order_control" and result.baseline_of(arm).name == base.name
        for seed, last in arm.gaps.items()
        for gap in (last, *_late_gaps(arm.runs[seed], result.base_runs(arm, seed)))
    ]
    return max(gaps, default=None)


def _late_gaps(run: Run, bases: Sequence[Run]) -> list[float]:
    """At the evaluations of the second half, where all losses are finite."""
    mine, *each = (_evaluations(read_metrics(one.dir)) for one in (run, *bases))
    last, theirs = max(mine, default=0), mean_points(each)
    both = [step for step in mine if step in theirs and 2 * step > last]
    return [gap for step in both if math.isfinite(gap := mine[step] - theirs[step])]


def mean_points(runs: Sequence[Points]) -> Points:
    """Average several runs of one seed, at the steps that all have."""
    steps = set.intersection(*(set(run) for run in runs)) if runs else set()
    return {step: fmean(run[step] for run in runs) for step in sorted(steps)}


def _evaluations(rows: Sequence[Row]) -> dict[int, float]:
    return {row["step"]: row["heldout_loss"] for row in rows if row.get("heldout_loss") is not None}


# ---------------------------------------------------------------------- over training


def training_band(controls: Sequence[Points], points: Iterable[int]) -> list[Row]:
    """Return ± the largest gap of the controls at each of `points` and just before; [] without
    controls.

    One step's gap crosses 0 now and then, which is no sign of less noise; and nothing after a step
    counts, so that the band opens where the controls part from their baseline.
    """
    steps = [step for run in controls for step in run]
    reach = max(1, max(steps, default=0) // _NEAR)
    return _rows({at: _largest(controls, at - reach, at) for at in sorted(points)})


def heldout_band(controls: Sequence[Points], points: Iterable[int]) -> list[Row]:
    """Return ± the largest gap of the controls at each of `points`, which are evaluations."""
    return _rows({at: _largest(controls, at, at) for at in sorted(points)})


def _largest(controls: Sequence[Points], first: int, last: int) -> float | None:
    found = [abs(run[step]) for run in controls for step in range(first, last + 1) if step in run]
    return max(found, default=None)


def _rows(found: Mapping[int, float | None]) -> list[Row]:
    return [{"step": s, "low": -v, "high": v} for s, v in found.items() if v is not None]


@dataclass(frozen=True)
class OrderNoise:
    """The gaps of one order control, in nats."""

    arm: str
    seeds: int
    mean: float
    largest: float  # of one seed, without its sign


@dataclass(frozen=True)
class NoiseFloor:
    """One baseline's noise, in nats per token; None where there are too few seeds or no margin."""

    baseline: str
    seeds: int
    spread: float  # standard deviation of the held-out loss over seeds
    typical: float  # median difference of two seeds
    unpaired: float  # half of the interval that as many unpaired seeds would give
    seeds_unpaired: int | None  # to find an equal arm inside the margin without pairing
    paired_spread: float | None  # of a gap over seeds, median of the arms near the baseline
    seeds_paired: int | None  # to find an equal arm inside the margin with pairing
    orders: Sequence[OrderNoise] = ()
    apart: Sequence[str] = ()  # arms of which pairing takes less than half of the variance off
    helped: int = 0  # how many others there are with enough seeds

    @property
    def lines(self) -> list[str]:
        """Sentences for a report."""
        pairs = [
            f"Two seeds of {self.baseline} differ by {self.typical:.4f} nats (median of "
            f"{self.seeds} seeds; standard deviation {self.spread:.4f}). Without pairing, this "
            f"many seeds measure a gap to ±{self.unpaired:.4f}."
        ]
        if self.paired_spread is not None:
            pairs.append(
                f"The gap to {self.baseline} with the same seed spreads by "
                f"{self.paired_spread:.4f} (median of the arms near it). Showing an equal arm "
                f"to be on par needs {_count(self.seeds_paired)} paired seeds, or "
                f"{_count(self.seeds_unpaired)} unpaired (80% power, one arm, one look)."
            )
        if self.apart:
            pairs.append(
                "Pairing by seed removes less than half of the noise from the gaps of "
                f"{', '.join(self.apart)}. Their losses hardly follow the baseline's from seed to "
                "seed, so an order control understates their noise. Other arms, where pairing "
                f"removes more: {self.helped}."
            )
        return pairs + [
            f"{order.arm}: only the order of sums differs. The gap is {order.mean:+.5f} nats "
            f"on average and {order.largest:.5f} at most over {order.seeds} seeds."
            for order in self.orders
        ]


def noise_floors(result: StudyResult) -> list[NoiseFloor]:
    """Return one for each baseline with two finished seeds or more, in the study's order."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline" and len(arm.finished) > 1]
    bases = [arm for arm in bases if arm.arm.role != "baseline_repeat"]
    return [_floor(result, base) for base in bases]


def _floor(result: StudyResult, base: ArmResult) -> NoiseFloor:
    losses = [loss for run in base.finished if (loss := run.heldout_loss) is not None]
    n, spread, confidence = len(losses), stdev(losses), result.study.confidence
    half = special.stdtrit(2 * n - 2, (1 + confidence) / 2) * spread * math.sqrt(2 / n)
    arms = [arm for arm in result.arms if arm.gap and result.baseline_of(arm).name == base.name]
    near = [a.gap.sd for a in arms if a.gap and a.gap.sd and a.verdict in NEAR]
    paired = median(near) if near else None
    off = {
        arm.name: taken_off(result, arm)
        for arm in arms
        if len(arm.gaps) >= PAIRED
        and arm.verdict != "baseline"
        and arm.arm.role not in ("negative_control", "order_control")
    }
    apart = [name for name, share in off.items() if share < 0.5]
    return NoiseFloor(
        base.name,
        n,
        spread,
        median(abs(a - b) for a, b in combinations(losses, 2)),
        float(half),
        _needed(spread * math.sqrt(2), base.margin, confidence),
        paired,
        None if paired is None else _needed(paired, base.margin, confidence),
        [_order(arm) for arm in arms if arm.arm.role == "order_control"],
        apart,
        len(off) - len(apart),
    )


def taken_off(result: StudyResult, arm: ArmResult) -> float:
    """Return the share of two unpaired runs' variance over seeds that pairing by seed takes off the
    gap of an arm with two seeds or more; below 0 where it adds some."""
    own = [_heldout([arm.runs[seed]]) for seed in arm.gaps]
    theirs = [_heldout(result.base_runs(arm, seed)) for seed in arm.gaps]
    both = variance(own) + variance(theirs)
    return 1 - variance(arm.gaps.values()) / both if both else 0.0


def _heldout(runs: Sequence[Run]) -> float:
    """The mean of the held-out losses of runs that a gap was taken from, so that all have one."""
    losses = [loss for run in runs if (loss := run.heldout_loss) is not None]
    assert len(losses) == len(runs), "a gap without a loss"
    return fmean(losses)


def _needed(spread: float, margin: float | None, confidence: float) -> int | None:
    return stats.seeds_for_equivalence(spread, margin, confidence) if margin else None


def _order(arm: ArmResult) -> OrderNoise:
    assert arm.gap is not None
    largest = max(abs(gap) for gap in arm.gaps.values())
    return OrderNoise(arm.name, arm.gap.n, arm.gap.mean, largest)


def _count(seeds: int | None) -> str:
    return str(seeds) if seeds is not None else f"more than {stats.MAX_SEEDS}"
