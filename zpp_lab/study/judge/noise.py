"""The noise of a study: how large gaps are when nothing, or nothing but the seed, has changed.

The noise floor needs several seeds. Two seeds of the baseline differ by initialization and data
order; an unpaired comparison would have to see an arm's gap through that. An order control differs
from the baseline only in the order of its sums; its gaps are what "nothing changed" looks like
after as many steps, for arms that stay beside their baseline as it does. Few bits can push a run
off its path. Then its loss hardly follows the baseline's from seed to seed, pairing takes little
off, and the gap holds the noise of two runs (experiments/reference).

The noise band serves a study with one seed, which has no test and no interval. Its order control
says at least what nothing looks like: an arm whose gap is no larger shows nothing, one far beyond
it shows something. One draw of the noise is little.

The quiet part: baseline and order control stay together for a while. An arm's gap in it is its
own, and says nothing of the end. Runs of one seed have the same tokens, so the norms of their
gradients go up and down together: where one jumps alone for a step, what follows in that run is
partly that step's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
QUIET = 0.01  # of the margin: an order control's gap up to that counts as nothing
NEAR = (*INSIDE, UNDECIDED)  # verdicts of arms whose gaps spread as an equal arm's do
FEWEST = 8  # steps; a shorter quiet part says nothing
PAIRED = 8  # seeds from which on it is told whether pairing by seed helps an arm
# A step apart: its norm over the other runs', corrected by how that is in the steps around
TIMES = 2.0
AROUND, TWINS = 3, 2  # steps before and after; other runs that it takes
NAMED = 6  # steps apart in a report's sentence


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
    """Of several runs of one seed, at the steps that all have."""
    steps = set.intersection(*(set(run) for run in runs)) if runs else set()
    return {step: fmean(run[step] for run in runs) for step in sorted(steps)}


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
            f"{order.arm}: only the order of sums differs. The gap is {_signed(order.mean)} nats "
            f"on average and {order.largest:.5f} at most over {order.seeds} seeds."
            for order in self.orders
        ]


def _signed(value: float) -> str:
    return f"{value:+.5f}".replace("-", "−")


def noise_floors(result: StudyResult) -> list[NoiseFloor]:
    """One for each baseline with two finished seeds or more, in the study's order."""
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
    """The share of two unpaired runs' variance over seeds that pairing by seed takes off the gap of
    an arm with two seeds or more; below 0 where it adds some."""
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


# ---------------------------------------------------------------------- the quiet part


@dataclass(frozen=True)
class Quiet:
    """One baseline's quiet part: steps 1 to `end`, in which no order control's training loss is
    over QUIET of the margin away.

    noise: their largest gap in it. arms: the mean gap and the largest amount of each arm, over
    steps and seeds. All in nats.
    """

    baseline: str
    controls: Sequence[str]
    end: int
    noise: float
    arms: Mapping[str, tuple[float, float]]


def quiet_parts(result: StudyResult) -> list[Quiet]:
    """One for each baseline that has an order control and a quiet part of FEWEST steps or more."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline" and arm.margin]
    return [part for base in bases if (part := _quiet(result, base)) is not None]


def _quiet(result: StudyResult, base: ArmResult) -> Quiet | None:
    of_base = [
        arm
        for arm in result.arms
        if arm.verdict != "baseline" and result.baseline_of(arm).name == base.name
    ]
    theirs = {seed: _losses(run) for seed, run in base.runs.items()}
    controls = {
        arm.name: found
        for arm in of_base
        if arm.arm.role == "order_control" and (found := _gaps(arm, theirs))
    }
    runs = [run for found in controls.values() for run in found]
    limit = QUIET * (base.margin or 0.0)
    end = min((_first_beyond(run, limit) for run in runs), default=0)
    if end < FEWEST:
        return None
    noise = max(abs(gap) for run in runs for gap in run[:end])
    gaps = {a.name: [g for run in _gaps(a, theirs) for g in run[:end]] for a in of_base}
    arms = {name: (fmean(own), max(map(abs, own))) for name, own in gaps.items() if own}
    return Quiet(base.name, list(controls), end, noise, arms)


def _gaps(arm: ArmResult, theirs: Mapping[int, Sequence[float]]) -> list[list[float]]:
    """For each seed of the verdict, or each that has begun while none has ended: the training
    loss's gap of steps 1, 2 … in order."""
    runs = {seed: arm.runs[seed] for seed in arm.gaps} or arm.runs
    pairs = [(_losses(run), theirs[seed]) for seed, run in runs.items() if seed in theirs]
    found = [[mine - other for mine, other in zip(*pair, strict=False)] for pair in pairs]
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


# ---------------------------------------------------------------------- steps apart


@dataclass(frozen=True)
class ApartStep:
    """norm: of this run's gradient before clipping; others: the median of its twins'."""

    arm: str
    seed: int
    step: int
    norm: float
    others: float

    @property
    def text(self) -> str:
        return (
            f"{self.arm} seed {self.seed} step {self.step} ({self.norm:.3g} for {self.others:.3g})"
        )


def apart_steps(result: StudyResult) -> list[ApartStep]:
    """Those of all runs but a negative control's, the furthest apart first."""
    arms = [arm for arm in result.arms if arm.arm.role != "negative_control"]
    found: list[ApartStep] = []
    for seed in sorted({seed for arm in arms for seed in arm.runs}):
        norms = {arm.name: _norms(arm.runs[seed]) for arm in arms if seed in arm.runs}
        for name in norms:
            found += _apart_of(name, seed, norms)
    return sorted(found, key=lambda one: one.others / one.norm)


def _norms(run: Run) -> dict[int, float]:
    """By step, where the norm is a positive number; a line may be cut short."""
    found = {row.get("step"): row.get("grad_norm") for row in read_metrics(run.dir)}
    return {
        step: float(norm)
        for step, norm in found.items()
        if isinstance(step, int) and isinstance(norm, int | float) and 0 < norm < float("inf")
    }


def _apart_of(
    name: str, seed: int, norms: Mapping[str, Mapping[int, float]]
) -> Iterator[ApartStep]:
    others: dict[int, float] = {}
    for step in norms[name]:
        twins = [own[step] for arm, own in norms.items() if arm != name and step in own]
        if len(twins) >= TWINS:
            others[step] = median(twins)
    ratios = {step: norms[name][step] / other for step, other in others.items()}
    for step, ratio in ratios.items():
        around = range(step - AROUND, step + AROUND + 1)
        near = [ratios[s] for s in around if s in ratios and s != step]
        if near and ratio >= TIMES * median(near):
            yield ApartStep(name, seed, step, norms[name][step], others[step])
