"""The statistics of paired seeds: gap, interval, the tests of three claims, seeds needed.

An arm sees the same initialization and tokens as the baseline of the same seed, so the loss gap of
a seed is one paired observation. A mean gap would be another with other seeds, and with other
documents: its variance has two crossed parts (Owen 2007, Ann. Appl. Stat. 1).

With parts v₁, v₂ and Student's quantiles t₁, t₂ of their degrees of freedom, the interval is
mean ± √(t₁² v₁ + t₂² v₂) (Banerjee 1960, Sankhya 22). It covers at least as often as it says: the
chance that a normal mean lies within ±√c is concave in c. Satterthwaite's single t is narrower, and
covers 93 to 94 % for 95 with three seeds. The p-value of a distance is the level at which the
interval just reaches it. Without a part of documents all are Student's.
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
_LEAST_P = 1e-15  # of a test over two parts


class Part(NamedTuple):
    """One part of the variance of a mean gap, in nats², with its degrees of freedom."""

    variance: float
    freedom: float


@dataclass(frozen=True)
class Gap:
    """Summary of n paired gaps, in nats. Intervals and p-values are None for a single seed.

    `interval` has the study's confidence (95 %); it is over seeds and, where there is a part of
    `documents`, over these too. The p-values are before any correction.
    """

    n: int
    mean: float
    sd: float | None = None
    interval: tuple[float, float] | None = None
    p_equal: float | None = None  # the larger p-value of the two one-sided tests
    p_differs: float | None = None  # of the two-sided test of a mean gap of 0
    p_beyond: float | None = None  # of the two-sided test of a gap at the nearer edge of ±margin
    documents: Part | None = None  # of the variance, what the choice of held-out documents makes
    deciding: tuple[float, float] | None = None  # as `interval`, at the level of the verdict's test
    level: float | None = None  # 1 − the confidence of `deciding`

    @property
    def shown(self) -> tuple[float, float] | None:
        """The interval next to a verdict."""
        return self.deciding or self.interval


class Tests(NamedTuple):
    """p-values of the three claims on a gap: it differs from 0, it is equal within ±margin, it lies
    beyond ±margin. A claim of less never has the larger p-value: differs <= beyond."""

    differs: float
    equal: float
    beyond: float


def summarize(
    gaps: Sequence[float], margin: float, confidence: float = 0.95, documents: Part | None = None
) -> Gap:
    """Return mean, intervals, the paired t test and those against ±margin.

    gaps: one per seed (at least one), finite. Gaps that are all the same have no spread to
    estimate: without documents their interval is the point itself and the tests are passed or not
    without doubt.
    """
    values = np.asarray(gaps, dtype=np.float64)
    assert values.size > 0, "no gaps"
    assert np.isfinite(values).all()
    assert margin > 0
    mean, tests = float(values.mean()), p_values(values, margin, documents)
    if tests is None:
        return Gap(1, mean, documents=documents)
    return Gap(
        values.size,
        mean,
        0.0 if _all_alike(values) else float(values.std(ddof=1)),
        t_interval(values, confidence, documents),
        tests.equal,
        tests.differs,
        tests.beyond,
        documents,
    )


def p_values(
    gaps: Sequence[float] | np.ndarray, margin: float, documents: Part | None = None
) -> Tests | None:
    """Return the p-values of the two-sided test of a mean gap of 0; the larger one of the two
    one-sided tests against ±margin; of the two-sided test against the nearer edge, 1 inside. None
    for a single seed."""
    values = np.asarray(gaps, dtype=np.float64)
    if values.size < 2:
        return None
    mean, parts = float(values.mean()), _parts(values, documents)
    over = abs(mean) - margin  # the nearer edge: the other one-sided test has the smaller p-value
    if not parts:
        return Tests(float(mean == 0), float(over >= 0), float(over <= 0))
    apart, inside, beyond = _tails([abs(mean), -over, over], parts)
    return Tests(min(1.0, 2 * apart), inside, min(1.0, 2 * beyond))


def _parts(values: np.ndarray, documents: Part | None) -> list[Part]:
    """The parts of the variance of the mean that are not 0."""
    found = [] if documents is None or documents.variance == 0 else [documents]
    if not _all_alike(values):
        found.append(Part(float(values.var(ddof=1)) / values.size, values.size - 1))
    return found


def _half(tail: float | np.ndarray, parts: Sequence[Part]) -> np.ndarray:
    """Half of the interval that leaves out `tail` on each side."""
    squares = [special.stdtrit(p.freedom, tail) ** 2 * p.variance for p in parts]
    return np.sqrt(sum(squares, np.zeros_like(tail)))


def _tails(distances: Sequence[float], parts: Sequence[Part]) -> list[float]:
    """For each distance the one-sided chance of so large a mean when the true one is 0."""
    away = np.abs(distances)
    if len(parts) == 1:
        found = special.stdtr(parts[0].freedom, -away / math.sqrt(parts[0].variance))
    else:
        low, high = (np.full(away.shape, math.log(p)) for p in (_LEAST_P, 0.5))
        for _ in range(40):
            middle = (low + high) / 2
            reaches = _half(np.exp(middle), parts) > away
            low, high = np.where(reaches, middle, low), np.where(reaches, high, middle)
        found = np.exp(high)
    return [float(p) for p in np.where(np.asarray(distances) >= 0, found, 1 - found)]


def _all_alike(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """Return Fieller's 95 % interval of the ratio of two means of pairs: every r for which
    Student's test of mean(over − r · under) = 0 is not rejected. ValueError where `under` is not
    distinguishable from 0, as the ratio then has no bounds."""
    n, (x, y) = len(over), (np.mean(over), np.mean(under))
    cov = np.cov(over, under) / n * special.stdtrit(n - 1, 0.975) ** 2
    a, b, c = y * y - cov[1, 1], cov[0, 1] - x * y, x * x - cov[0, 0]
    if a <= 0:
        raise ValueError("the lower mean may be 0: the ratio has no bounds; add seeds")
    root = math.sqrt(max(b * b - a * c, 0.0))
    return float((-b - root) / a), float((-b + root) / a)


def t_interval(
    values: Sequence[float] | np.ndarray, confidence: float, documents: Part | None = None
) -> tuple[float, float]:
    """Return the interval of the mean of two or more values, over seeds and documents."""
    values = np.asarray(values, dtype=np.float64)
    mean, half = float(values.mean()), float(_half((1 - confidence) / 2, _parts(values, documents)))
    return mean - half, mean + half


def part_interval(mean: float, part: Part, confidence: float) -> tuple[float, float]:
    """Return Student's interval of a mean whose variance has one part."""
    half = float(_half((1 - confidence) / 2, [part]))
    return mean - half, mean + half


def decision_probability(
    n: int,
    mean: float,
    sd: float,
    margin: float,
    confidence: float = 0.95,
    edge: float = 0.0,
    documents: Part | None = None,
) -> tuple[float, float]:
    """Return (P(inside the margin), P(inside or beyond `edge`)) for n seeds when the gap is N(mean,
    sd²).

    edge: 0 asks whether the gap differs from 0, the margin whether it lies beyond that. With h the
    half of the sample's 90 or 95 % interval, "inside" is |m| < margin − h₉₀ and "beyond" is
    |m| > edge + h₉₅ for the sample mean m. Given the seeds' deviation both are normal
    probabilities; they are averaged over its chi distribution, which makes them exact for small n
    too. The part of the documents does not shrink with more seeds, and is taken as known.
    """
    alpha, df = 1 - confidence, n - 1
    grid = (np.arange(2000) + 0.5) / 2000
    text = documents or Part(0.0, 1.0)
    error = math.sqrt(sd**2 / n + text.variance)
    spread = sd**2 / n * 2 * special.gammaincinv(df / 2, grid) / df

    def half(tail: float) -> np.ndarray:
        quantiles = special.stdtrit([df, text.freedom], tail)
        return np.sqrt(quantiles[0] ** 2 * spread + quantiles[1] ** 2 * text.variance)

    inside, outside = margin - half(alpha), edge + half(alpha / 2)

    def within(limit: np.ndarray) -> np.ndarray:
        limit = np.maximum(limit, 0)
        return special.ndtr((limit - mean) / error) - special.ndtr((-limit - mean) / error)

    found = within(inside)
    decided = np.where(inside >= outside, 1.0, found + 1 - within(outside))
    return float(found.mean()), float(decided.mean())


def seeds_for_equivalence(
    sd: float, margin: float, confidence: float = 0.95, power: float = _POWER
) -> int | None:
    """Return fewest seeds at which an arm with a true gap of 0 is found inside the margin with
    `power`.

    None: more than MAX_SEEDS.
    """
    if sd == 0:
        return 2
    return _fewest(2, lambda n: decision_probability(n, 0.0, sd, margin, confidence)[0] >= power)


def seeds_to_decide(
    gap: Gap, margin: float, confidence: float = 0.95, edge: float = 0.0, power: float = _POWER
) -> int | None:
    """Return fewest seeds, more than gap.n, at which the gap is found inside the margin or beyond
    `edge` with `power`; see `decision_probability`.

    Takes the measured mean and deviation as the true ones. None: more than MAX_SEEDS, or
    nothing to go by (one seed).
    """
    if not gap.sd:
        return None
    known = (gap.mean, gap.sd, margin, confidence, edge, gap.documents)
    return _fewest(gap.n + 1, lambda n: decision_probability(n, *known)[1] >= power)


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
