"""Coverage of the intervals over documents, on simulated corpora with unequal documents."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom
from scipy.stats import bootstrap as scipy_bootstrap

from zpp_lab.study.judge.documents import RESAMPLES, document_gap, draws

GAP, DOCUMENTS, TRIALS = 0.01, 120, 500


def corpus(
    rng: np.random.Generator, seeds: int, of_seed: float, of_document: float, rest: float
) -> tuple[np.ndarray, np.ndarray]:
    """(nats [seeds, documents], tokens): lengths spread over a factor of ten, heavy tails."""
    tokens = np.ceil(rng.lognormal(5, 0.6, DOCUMENTS))
    per_token = (
        GAP + rng.normal(0, of_seed, (seeds, 1)) + of_document * rng.standard_t(6, DOCUMENTS)
    )
    return (per_token + rng.normal(0, rest, (seeds, DOCUMENTS))) * tokens, tokens


def covered(seeds: int, of_seed: float, of_document: float, rest: float) -> tuple[float, float]:
    """Share of TRIALS in which the interval over documents, and that over both, holds GAP."""
    rng = np.random.default_rng([seeds, int(1e5 * of_seed)])
    hits = np.zeros(2)
    for _ in range(TRIALS):
        found = document_gap(*corpus(rng, seeds, of_seed, of_document, rest))
        assert found.both is not None
        for i, (low, high) in enumerate((found.interval, found.both)):
            hits[i] += low <= GAP <= high
    return float(hits[0] / TRIALS), float(hits[1] / TRIALS)


def slack(share: float) -> float:
    """By how much a share out of TRIALS misses its expectation once in 20,000."""
    return float(binom.std(TRIALS, share)) / TRIALS * 4


def test_interval_over_documents_covers_the_gap_of_other_text() -> None:
    share, _ = covered(3, 0.0, 0.01, 0.01)
    assert 0.93 - slack(0.93) <= share <= 0.97 + slack(0.97)


@pytest.mark.parametrize("seeds", [3, 5])
def test_interval_over_seeds_and_documents_covers_the_gap(seeds: int) -> None:
    alone, both = covered(seeds, 0.004, 0.01, 0.004)
    assert 0.93 - slack(0.93) <= both
    assert alone < 0.8  # documents alone know nothing of other seeds


def test_equal_files_give_equal_intervals() -> None:
    nats, tokens = corpus(np.random.default_rng(0), 4, 0.001, 0.01, 0.01)
    one = document_gap(nats, tokens)
    draws.cache_clear()
    assert document_gap(nats, tokens) == one
    assert (one.documents, one.seeds) == (DOCUMENTS, 4)
    assert one.mean == pytest.approx((nats.sum(1) / tokens.sum()).mean())
    assert one.interval[0] < one.mean < one.interval[1]


def test_agrees_with_scipy() -> None:
    nats, tokens = corpus(np.random.default_rng(1), 3, 0.0, 0.01, 0.01)
    other = scipy_bootstrap(
        (nats.mean(0), tokens),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        n_resamples=RESAMPLES,
        paired=True,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    mine = document_gap(nats, tokens).interval
    width = other.high - other.low
    assert mine == pytest.approx((other.low, other.high), abs=0.04 * width)


def test_no_difference_has_no_width_and_one_seed_no_spread() -> None:
    found = document_gap(np.zeros((2, 5)), np.ones(5))
    assert (found.interval, found.both) == ((0.0, 0.0), (0.0, 0.0))
    assert document_gap(np.ones((1, 5)), np.ones(5)).both is None


def test_draws_are_fair() -> None:
    counts = draws(50, 50, 0)
    assert (counts.sum(1) == 50).all()
    assert np.abs(counts.mean(0) - 1).max() < 5 / RESAMPLES**0.5
    assert counts.var() == pytest.approx(0.98, rel=0.01)
