from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.stats import binom

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.study.judge.families import (
    Sides,
    ever_below,
    look_sizes,
    nominal_level,
    planned_seeds,
)

TRIALS = 20_000
SIZES = (3, 5, 7, 9)


def most(probability: float) -> int:
    """A count out of TRIALS that a true probability exceeds once in a million."""
    return int(binom.ppf(1 - 1e-6, TRIALS, probability))


def p_values(sizes: tuple[int, ...], mean: float, sides: Sides, key: int) -> np.ndarray:
    """p of scipy's t test at each look, [TRIALS, looks], for gaps N(mean, 1)."""
    values = np.random.default_rng(key).normal(mean, 1, (TRIALS, sizes[-1]))
    side = "two-sided" if sides == 2 else "less"
    looks = [scipy_stats.ttest_1samp(values[:, :n], 0, axis=1, alternative=side) for n in sizes]
    return np.stack([look.pvalue for look in looks], 1)


def study(**changes: int) -> StudyConfig:
    return StudyConfig("s", "?", [ArmConfig("zero3")], [4, 1, 2], **changes)


def test_seeds_and_looks_are_planned_ahead() -> None:
    assert planned_seeds(study()) == [4, 1, 2]
    assert look_sizes(study()) == (3,)
    more = study(max_seeds=8, seeds_per_look=2)
    assert planned_seeds(more) == [4, 1, 2, 5, 6, 7, 8, 9]
    assert look_sizes(more) == (3, 5, 7, 8)
    assert look_sizes(study(max_seeds=2)) == (3,)


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("sizes", [SIZES, (2, 3, 4, 5, 6), (5, 10)])
def test_looking_again_errs_as_often_as_it_says(sizes: tuple[int, ...], sides: Sides) -> None:
    smallest = p_values(sizes, 0, sides, sides + len(sizes)).min(1)
    level = nominal_level(0.05, sizes, sides)
    assert 0.05 / len(sizes) <= level < 0.05
    low = int(binom.ppf(1e-6, TRIALS, 0.046))  # no far too careful level either
    assert low <= (smallest <= level).sum() <= most(0.052)
    assert (smallest <= 0.05).sum() > most(0.06)  # without it
    assert ever_below(level, sizes, sides) == pytest.approx(0.05, rel=0.02)


def test_tiny_p_values_are_bounded_by_the_number_of_looks() -> None:
    assert ever_below(1e-9, SIZES, 2) == pytest.approx(4e-9)
    assert ever_below(1.0, SIZES, 2) == 1.0
    grid = np.linspace(0, 1, 200)
    values = [ever_below(float(p), SIZES, 2) for p in grid]
    assert values == sorted(values)
    assert all(p <= v <= 4 * p for p, v in zip(grid, values, strict=True))


def test_the_interval_covers_wherever_the_study_stops() -> None:
    """Stop as soon as 0 is outside: the plain interval misses too often, the corrected never."""
    truth, rng = 0.0, np.random.default_rng(11)
    values = rng.normal(truth, 1, (TRIALS, SIZES[-1]))
    for confidence, fine in ((0.95, False), (1 - nominal_level(0.05, SIZES, 2), True)):
        missed = np.zeros(TRIALS, dtype=bool)
        for n in SIZES:
            part = values[:, :n]
            half = scipy_stats.t.ppf((1 + confidence) / 2, n - 1) * part.std(1, ddof=1) / n**0.5
            missed |= np.abs(part.mean(1) - truth) > half
        assert (missed.sum() <= most(0.052)) == fine
