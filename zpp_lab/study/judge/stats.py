"""The statistics of paired seeds: gap, interval, equivalence test, seeds needed.

Every arm sees the same initialization and the same tokens as the baseline for
the same seed, so the loss gap of a seed is one paired observation in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

MAX_SEEDS = 10_000
_POWER = 0.8


@dataclass(frozen=True)
class Gap:
    """Summary of n paired gaps, in nats. Intervals and p-values are None for a single seed.

    `interval` has the study's confidence (95 %); `inner` is the 1 − 2·alpha (90 %) interval,
    which lies inside ±margin exactly when the equivalence test passes. The p-values are those
    of these seeds alone, before any correction.
    """

    n: int
    mean: float
    sd: float | None = None
    interval: tuple[float, float] | None = None
    inner: tuple[float, float] | None = None
    p_equal: float | None = None  # the larger p-value of the two one-sided tests
    p_differs: float | None = None  # of the two-sided test of a mean gap of 0
    p_beyond: float | None = None  # of the two-sided test of a gap at the nearer edge of ±margin


class Tests(NamedTuple):
    """p-values of the three claims on a gap: it differs from 0, it is equal within ±margin, it lies
    beyond ±margin. A claim of less never has the larger p-value: differs <= beyond."""

    differs: float
    equal: float
    beyond: float


def summarize(
    gaps: Sequence[float], margin: float, confidence: float = 0.95, inner: float | None = None
) -> Gap:
    """Mean, t intervals, the paired t test and the two one-sided ones against ±margin.

    gaps: one per seed (at least one), finite. Gaps that are all the same have no spread to
    estimate: their interval is the point itself and the tests are passed or not without doubt.
    inner: confidence of the inner interval; None is 2 · confidence − 1.
    """
    values = np.asarray(gaps, dtype=np.float64)
    assert values.size > 0, "no gaps"
    assert np.isfinite(values).all()
    assert margin > 0
    mean = float(values.mean())
    if values.size == 1:
        return Gap(1, mean)
    tests = p_values(values, margin)
    assert tests is not None
    told = (tests.equal, tests.differs, tests.beyond)
    if _all_alike(values):
        return Gap(values.size, mean, 0.0, (mean, mean), (mean, mean), *told)
    return Gap(
        values.size,
        mean,
        float(values.std(ddof=1)),
        t_interval(values, confidence),
        t_interval(values, 2 * confidence - 1 if inner is None else inner),
        *told,
    )


def p_values(gaps: Sequence[float] | np.ndarray, margin: float) -> Tests | None:
    """Of the two-sided t test of a mean gap of 0; the larger one of the two one-sided tests against
    ±margin; of the two-sided test against the nearer edge, 1 inside. None for a single seed."""
    values = np.asarray(gaps, dtype=np.float64)
    if values.size < 2:
        return None
    mean, df = float(values.mean()), values.size - 1
    over = abs(mean) - margin  # the nearer edge: the other one-sided test has the smaller p-value
    if _all_alike(values):
        return Tests(float(mean == 0), float(over >= 0), float(over <= 0))
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    apart, inside, beyond = special.stdtr(df, [-abs(mean) / error, over / error, -over / error])
    return Tests(float(2 * apart), float(inside), float(min(1.0, 2 * beyond)))


def _all_alike(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def t_interval(values: Sequence[float] | np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's t interval of the mean of two or more values."""
    n, mean = len(values), float(np.mean(values))
    half = special.stdtrit(n - 1, (1 + confidence) / 2) * np.std(values, ddof=1) / math.sqrt(n)
    return mean - float(half), mean + float(half)


def decision_probability(
    n: int, mean: float, sd: float, margin: float, confidence: float = 0.95, edge: float = 0.0
) -> tuple[float, float]:
    """(P(inside the margin), P(inside or beyond `edge`)) for n seeds when the gap is N(mean, sd²).

    edge: 0 asks whether the gap differs from 0, the margin whether it lies beyond that. With s the
    sample's deviation, "inside" is |m| < margin − t₉₀·s/√n and "beyond" is |m| > edge + t₉₅·s/√n
    for the sample mean m. Given s both are normal probabilities; they are averaged over the chi
    distribution of s, which makes them exact for small n too.
    """
    alpha, df = 1 - confidence, n - 1
    grid = (np.arange(2000) + 0.5) / 2000
    error = sd / math.sqrt(n)
    spread = error * np.sqrt(2 * special.gammaincinv(df / 2, grid) / df)
    inside = margin - special.stdtrit(df, 1 - alpha) * spread
    outside = edge + special.stdtrit(df, 1 - alpha / 2) * spread

    def within(limit: np.ndarray) -> np.ndarray:
        limit = np.maximum(limit, 0)
        return special.ndtr((limit - mean) / error) - special.ndtr((-limit - mean) / error)

    found = within(inside)
    decided = np.where(inside >= outside, 1.0, found + 1 - within(outside))
    return float(found.mean()), float(decided.mean())


def seeds_for_equivalence(
    sd: float, margin: float, confidence: float = 0.95, power: float = _POWER
) -> int | None:
    """Fewest seeds at which an arm with a true gap of 0 is found inside the margin with `power`.

    None: more than MAX_SEEDS.
    """
    if sd == 0:
        return 2
    return _fewest(2, lambda n: decision_probability(n, 0.0, sd, margin, confidence)[0] >= power)


def seeds_to_decide(
    gap: Gap, margin: float, confidence: float = 0.95, edge: float = 0.0, power: float = _POWER
) -> int | None:
    """Fewest seeds, more than gap.n, at which the gap is found inside the margin or beyond `edge`
    with `power`; see `decision_probability`.

    Takes the measured mean and deviation as the true ones. None: more than MAX_SEEDS, or
    nothing to go by (one seed).
    """
    if not gap.sd:
        return None
    mean, sd = gap.mean, gap.sd
    return _fewest(
        gap.n + 1, lambda n: decision_probability(n, mean, sd, margin, confidence, edge)[1] >= power
    )


def _fewest(start: int, enough) -> int | None:
    """Smallest n in [start, MAX_SEEDS] with enough(n), which must stay true once it is."""
    low, high = start, start
    while not enough(high):
        if high >= MAX_SEEDS:
            return None
        low, high = high + 1, min(2 * high, MAX_SEEDS)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high
