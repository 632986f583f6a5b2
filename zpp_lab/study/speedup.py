"""How much faster than plain FSDP2 each arm is, and at which bandwidth it stops being so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zpp_lab.study.speed_results import BASE, Measured, Setting, settings

FASTER = 0.02  # a lead of less is none: an arm's own steps differ by about as much


@dataclass(frozen=True)
class SpeedUp:
    """An arm's tokens/s over the base's at the same link; low to high: by its slowest and fastest
    step (both the value itself where the table has no spread)."""

    at: Measured
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BreakEven:
    """Where an arm's speed-up crosses 1.

    crossings: Gb/s, rising, between which `first` (is it faster at the slowest link?) alternates.
    slowest, fastest: the links measured.
    """

    setting: Setting
    arm: str
    first: bool
    crossings: Sequence[float]
    slowest: float
    fastest: float

    @property
    def text(self) -> str:
        """In words: for which bandwidths the arm is faster."""
        if self.slowest == self.fastest:
            return f"{'faster' if self.first else 'not faster'} at the only speed measured"
        if not self.crossings:
            return f"{'always' if self.first else 'never'} faster in the measured range"
        edges = [None, *self.crossings, None]
        spans = list(pairwise(edges))[0 if self.first else 1 :: 2]
        return "faster " + " and ".join(_span(low, high) for low, high in spans)


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"from {gbps_text(low)} to {gbps_text(high)} Gb/s"
    if low is not None:
        return f"above {gbps_text(low)} Gb/s"
    assert high is not None
    return f"below {gbps_text(high)} Gb/s"


def gbps_text(gbps: float) -> str:
    """Three digits, and never an exponent."""
    return f"{gbps:,.0f}" if gbps >= 100 else f"{gbps:.3g}"


def speed_ups(measured: Sequence[Measured]) -> list[SpeedUp]:
    """Of every measurement whose setting and link the base was measured at, the base's own too."""
    bases = {(m.setting, m.link): m for m in measured if m.arm == BASE}
    found = []
    for m in measured:
        base = bases.get((m.setting, m.link))
        if base is None:
            continue
        value = m.tokens_per_s / base.tokens_per_s
        low = value * _ratio(m.step_s, m.step_max_s)
        found.append(SpeedUp(m, value, low, value * _ratio(m.step_s, m.step_min_s)))
    return found


def without_base(measured: Sequence[Measured]) -> list[Setting]:
    """Settings at which an arm has no base to be compared with at any link."""
    known = {one.at.setting for one in speed_ups(measured)}
    return [setting for setting in settings(measured) if setting not in known]


def break_evens(ups: Sequence[SpeedUp]) -> list[BreakEven]:
    """One for each setting and arm, but the base, that has a bandwidth; in the table's order.

    Between two measured links the logarithm of the speed-up is taken as linear in that of the
    bandwidth. A speed-up of just 1 is not faster.
    """
    groups: dict[tuple[Setting, str], list[SpeedUp]] = {}
    for one in ups:
        if one.at.gbps is not None and one.at.arm != BASE:
            groups.setdefault((one.at.setting, one.at.arm), []).append(one)
    return [_break_even(*key, group) for key, group in groups.items()]


def _break_even(setting: Setting, arm: str, ups: Sequence[SpeedUp]) -> BreakEven:
    points = sorted((one.at.gbps or 0.0, one.value) for one in ups)
    crossings = [
        math.exp(math.log(x0) + math.log(x1 / x0) * math.log(y0) / (math.log(y0) - math.log(y1)))
        for (x0, y0), (x1, y1) in pairwise(points)
        if (y0 > 1) != (y1 > 1)
    ]
    return BreakEven(setting, arm, points[0][1] > 1, crossings, points[0][0], points[-1][0])


def _ratio(median: float | None, other: float | None) -> float:
    return 1.0 if median is None or other is None else median / other
