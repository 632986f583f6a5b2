from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, ttest_rel
from statsmodels.stats.weightstats import ttost_paired

from zpp_lab.study.judge.stats import (
    decision_probability,
    ratio_interval,
    seeds_for_equivalence,
    summarize,
    t_interval,
)

TRIALS = 5000


def bounds(probability: float) -> tuple[int, int]:
    """Counts out of TRIALS that miss a true probability once in a million."""
    low, high = binom.interval(1 - 1e-6, TRIALS, probability)
    return int(low), int(high)


@pytest.mark.parametrize("n", [2, 5])
def test_interval_covers_the_true_gap_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(n)
    hits = 0
    for _ in range(TRIALS):
        low, high = t_interval(rng.normal(0.01, 0.004, n), 0.95)
        hits += low <= 0.01 <= high
    low, high = bounds(0.95)
    assert low <= hits <= high


@pytest.mark.parametrize("side", [-1, 1])
def test_equivalence_is_found_in_5_percent_of_studies_at_the_margin(side: int) -> None:
    margin, rng = 0.006, np.random.default_rng(10 + side)
    passed = 0
    for _ in range(TRIALS):
        p = summarize(rng.normal(side * margin, 0.002, 4), margin).p_equal
        assert p is not None
        passed += p < 0.05
    low, high = bounds(0.05)
    assert low <= passed <= high  # not more, and the small spread makes it not less


def test_equivalence_is_never_likelier_than_5_percent_at_the_margin() -> None:
    margin, rng = 0.006, np.random.default_rng(3)
    gaps = [summarize(rng.normal(margin, 0.02, 4), margin) for _ in range(TRIALS)]
    assert sum(g.p_equal < 0.05 for g in gaps if g.p_equal is not None) <= bounds(0.05)[1]


def test_agrees_with_scipy_and_statsmodels_on_paired_losses() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(2.3, 0.05, 6)
    arm = base + rng.normal(0.002, 0.003, 6)
    gap = summarize(list(arm - base), margin=0.005)
    assert gap.p_equal == pytest.approx(ttost_paired(arm, base, -0.005, 0.005)[0])
    test = ttest_rel(arm, base)
    assert gap.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert t_interval(arm - base, 0.90) == pytest.approx(tuple(test.confidence_interval(0.90)))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(1e-3, 1))
def test_test_and_inner_interval_agree(gaps: list[float], margin: float) -> None:
    gap = summarize(gaps, margin)
    inner = t_interval(gaps, 0.90)
    assert gap.interval is not None
    assert gap.p_equal is not None
    assert all(map(math.isfinite, (*inner, *gap.interval, gap.p_equal)))
    inside = -margin < inner[0] and inner[1] < margin
    if abs(gap.p_equal - 0.05) > 1e-6:
        assert inside == (gap.p_equal < 0.05)


@pytest.mark.parametrize(("value", "p"), [(0.0, 0.0), (0.004, 0.0), (0.02, 1.0), (-0.02, 1.0)])
def test_equal_gaps_are_their_own_interval(value: float, p: float) -> None:
    gap = summarize([value] * 3, 0.01)
    assert (gap.sd, gap.interval, gap.p_equal) == (0.0, (value, value), p)


@pytest.mark.parametrize(
    ("n", "mean", "sd"), [(3, 0.0, 0.002), (3, 0.004, 0.006), (8, 0.009, 0.01), (2, 0.02, 0.004)]
)
@pytest.mark.parametrize("edge", [0.0, 0.006])
def test_decision_probability_is_what_simulated_studies_do(
    n: int, mean: float, sd: float, edge: float
) -> None:
    margin, rng = 0.006, np.random.default_rng(n)
    gaps = [summarize(rng.normal(mean, sd, n), margin) for _ in range(TRIALS)]
    on_par = [g.p_equal is not None and g.p_equal < 0.05 for g in gaps]
    apart = [g.interval is not None and max(g.interval[0], -g.interval[1]) > edge for g in gaps]
    expected = decision_probability(n, mean, sd, margin, edge=edge)
    for count, probability in zip(
        (sum(on_par), sum(a or b for a, b in zip(on_par, apart, strict=True))),
        expected,
        strict=True,
    ):
        low, high = bounds(probability)
        assert low <= count <= high


@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_seeds_for_equivalence_is_the_fewest_with_80_percent(ratio: float) -> None:
    n = seeds_for_equivalence(sd=ratio * 0.006, margin=0.006)
    assert n is not None
    assert decision_probability(n, 0.0, ratio * 0.006, 0.006)[0] >= 0.8
    assert n == 2 or decision_probability(n - 1, 0.0, ratio * 0.006, 0.006)[0] < 0.8


def test_the_ratio_of_paired_means_is_bounded_only_where_the_lower_one_is_not_zero() -> None:
    under = [1.0, 1.2, 0.9, 1.1]
    assert ratio_interval([2 * x for x in under], under) == pytest.approx((2, 2))
    low, high = ratio_interval([2.1, 2.2, 1.8, 2.3], under)
    assert low < 2 < high
    with pytest.raises(ValueError, match="ratio"):
        ratio_interval(under, [0.1, -0.1, 0.2, -0.2])
