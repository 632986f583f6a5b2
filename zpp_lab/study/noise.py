"""The noise floor: how large gaps are when nothing, or nothing but the seed, has changed.

Two seeds of the baseline differ by initialization and data order; an unpaired comparison would
have to see an arm's gap through that. An order control differs from the baseline only in the
order of its sums; its gaps are what "nothing changed" looks like after as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, stdev

from scipy import special

from zpp_lab.study import stats
from zpp_lab.study.verdict import ArmResult, StudyResult


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
    seeds_unpaired: int | None  # to find an equal arm on par without pairing
    paired_spread: float | None  # of a gap over seeds, median of the arms near the baseline
    seeds_paired: int | None  # to find an equal arm on par with pairing
    orders: Sequence[OrderNoise] = ()

    @property
    def lines(self) -> list[str]:
        """Sentences for a report."""
        pairs = [
            f"Two seeds of {self.baseline} differ by {self.typical:.4f} nats (median of "
            f"{self.seeds} seeds; standard deviation {self.spread:.4f}). Without pairing, as many "
            f"seeds would know a gap to ±{self.unpaired:.4f} only."
        ]
        if self.paired_spread is not None:
            pairs.append(
                f"The gap to {self.baseline} with the same seed spreads by "
                f"{self.paired_spread:.4f} (median of the arms near it). To find an equal arm on "
                f"par takes {_count(self.seeds_paired)} seeds paired, "
                f"{_count(self.seeds_unpaired)} unpaired (80% power, one arm, one look)."
            )
        return pairs + [
            f"{order.arm}: only the order of sums differs, and the gap is {_signed(order.mean)} "
            f"nats on average, {order.largest:.5f} at most over {order.seeds} seeds."
            for order in self.orders
        ]


def _signed(value: float) -> str:
    return f"{value:+.5f}".replace("-", "−")


def noise_floors(result: StudyResult) -> list[NoiseFloor]:
    """One for each baseline with two finished seeds or more, in the study's order."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline" and len(arm.finished) > 1]
    return [_floor(result, base) for base in bases]


def _floor(result: StudyResult, base: ArmResult) -> NoiseFloor:
    losses = [loss for run in base.finished if (loss := run.heldout_loss) is not None]
    n, spread, confidence = len(losses), stdev(losses), result.study.confidence
    half = special.stdtrit(2 * n - 2, (1 + confidence) / 2) * spread * math.sqrt(2 / n)
    arms = [arm for arm in result.arms if arm.gap and result.baseline_of(arm).name == base.name]
    near = [a.gap.sd for a in arms if a.gap and a.gap.sd and a.verdict in ("on par", "undecided")]
    paired = median(near) if near else None
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
    )


def _needed(spread: float, margin: float | None, confidence: float) -> int | None:
    return stats.seeds_for_equivalence(spread, margin, confidence) if margin else None


def _order(arm: ArmResult) -> OrderNoise:
    assert arm.gap is not None
    largest = max(abs(gap) for gap in arm.gaps.values())
    return OrderNoise(arm.name, arm.gap.n, arm.gap.mean, largest)


def _count(seeds: int | None) -> str:
    return str(seeds) if seeds is not None else f"more than {stats.MAX_SEEDS}"
