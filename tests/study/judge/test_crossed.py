"""Coverage of the intervals over seeds and documents, on simulated corpora of unequal documents,
and error rates of studies that look at them again and again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import binom
from scipy.stats import bootstrap as scipy_bootstrap

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.study.judge.documents import DocumentGaps, combined, document_part
from zpp_lab.study.judge.families import Entry, PValues, replay
from zpp_lab.study.judge.stats import summarize, t_interval

GAP, TRIALS = 0.01, 1500


def corpus(
    rng: np.random.Generator,
    shape: tuple[int, int],
    of_seed: float,
    of_document: float,
    rest: float,
    gap: float = GAP,
) -> tuple[np.ndarray, np.ndarray]:
    """(nats [seeds, documents], tokens): lengths spread over a factor of ten, heavy tails."""
    seeds, documents = shape
    tokens = np.ceil(rng.lognormal(5, 0.6, documents))
    each = gap + rng.normal(0, of_seed, (seeds, 1)) + of_document * rng.standard_t(6, documents)
    noise = rng.normal(0, rest, shape) * np.sqrt(tokens.mean() / tokens)
    return (each + noise) * tokens, tokens


OVER = {
    "both": lambda gaps, texts: t_interval(gaps, 0.95, texts.part(range(len(gaps)))),
    "seeds": lambda gaps, _: t_interval(gaps, 0.95),
    "documents": lambda _, texts: texts.interval(0.95),
}


def covered(shape: tuple[int, int], *spreads: float, over: Sequence[str]) -> list[float]:
    """Share of TRIALS in which the intervals `over` each hold GAP."""
    rng = np.random.default_rng([*shape, *(int(1e5 * s) for s in spreads)])
    hits = np.zeros(len(over))
    for _ in range(TRIALS):
        nats, tokens = corpus(rng, shape, *spreads)
        gaps = nats.sum(1) / tokens.sum()
        texts = DocumentGaps("", tokens, dict(enumerate(nats)))
        found = [OVER[way](gaps, texts) for way in over]
        hits += [low <= GAP <= high for low, high in found]
    return list(hits / TRIALS)


def slack(share: float, trials: int = TRIALS) -> float:
    """By how much a share out of `trials` misses its expectation once in 20,000."""
    return float(binom.std(trials, share)) / trials * 4


def test_interval_over_documents_covers_the_gap_of_other_text() -> None:
    (share,) = covered((3, 120), 0.0, 0.01, 0.01, over=["documents"])
    assert 0.93 - slack(0.93) <= share <= 0.97 + slack(0.97)


@pytest.mark.parametrize("shape", [(3, 4), (3, 120), (5, 12), (8, 4), (8, 40)])
def test_interval_over_seeds_and_documents_covers_the_gap(shape: tuple[int, int]) -> None:
    """Whatever makes the spread: seeds, documents, both alike, or each seed's noise on each."""
    root = shape[1] ** 0.5
    for of_seed, of_document, rest in ((4, 0, 1), (0, 4, 1), (1, root, 1), (0.5, 1, 2 * root)):
        spreads = (of_seed * 1e-3, of_document * 1e-3, rest * 1e-3)
        (both,) = covered(shape, *spreads, over=["both"])
        assert both >= 0.945 - slack(0.945)


def test_the_noise_of_a_seed_on_a_document_counts_once() -> None:
    """Where it is all that there is, the part of documents is small, and the interval that of
    seeds alone, nearly."""
    rng = np.random.default_rng(0)
    wider = []
    for _ in range(200):
        nats, tokens = corpus(rng, (4, 200), 0.0, 0.0, 0.02)
        gaps, part = nats.sum(1) / tokens.sum(), document_part(nats, tokens)
        assert part.variance < document_part(nats, tokens, crossed=False).variance
        wider.append(np.ptp(t_interval(gaps, 0.95, part)) / np.ptp(t_interval(gaps, 0.95)))
    assert 1 <= np.median(wider) < 1.05


LOOKS = StudyConfig("s", "?", [ArmConfig("zero3"), ArmConfig("a")], [1, 2, 3], max_seeds=7)
STUDIES = 250


SLOW = [pytest.param(spread, marks=pytest.mark.slow) for spread in (0.0, 0.004)]


@pytest.mark.parametrize("of_document", [*SLOW, 0.03])
def test_looking_again_at_the_same_documents_errs_no_more_often(of_document: float) -> None:
    """Up to five looks, which add seeds and no documents: a gap of 0 differs, one at the margin is
    inside or beyond it, each in at most 5 % of studies."""
    for key, (gap, claims) in enumerate(((0.0, ["differs"]), (GAP, ["equal", "beyond"]))):
        rng = np.random.default_rng([key, int(1e4 * of_document)])
        wrong = dict.fromkeys(claims, 0)
        for _ in range(STUDIES):
            nats, tokens = corpus(rng, (7, 40), 0.002, of_document, 0.004, gap)
            by_seed = dict(enumerate(nats, 1))
            gaps = {seed: float(row.sum() / tokens.sum()) for seed, row in by_seed.items()}
            texts = DocumentGaps("", tokens, by_seed)
            entry = Entry(gaps, frozenset(gaps), GAP, True, documents=texts)
            found = replay(LOOKS, {"a": entry}).tests["a"]
            for claim in claims:
                wrong[claim] += below(found, claim)
        assert max(wrong.values()) <= int(binom.ppf(1 - 1e-4, STUDIES, 0.05))


def below(found: PValues, claim: str) -> bool:
    p = getattr(found, f"{claim}_corrected")
    return p is not None and p < 0.05


def test_test_and_interval_over_both_agree() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        nats, tokens = corpus(rng, (4, 20), 0.01, 0.03, 0.01)
        part, gaps = document_part(nats, tokens), list(nats.sum(1) / tokens.sum())
        gap = summarize(gaps, 0.02, documents=part)
        assert gap.interval is not None
        inner = t_interval(gaps, 0.90, part)
        outside = gap.interval[0] > 0 or gap.interval[1] < 0
        assert outside == (gap.p_differs is not None and gap.p_differs < 0.05)
        inside = inner[0] > -0.02 and inner[1] < 0.02
        assert inside == (gap.p_equal is not None and gap.p_equal < 0.05)
        beyond = max(gap.interval[0], -gap.interval[1]) > 0.02
        assert beyond == (gap.p_beyond is not None and gap.p_beyond < 0.05)


def test_agrees_with_scipy() -> None:
    nats, tokens = corpus(np.random.default_rng(1), (3, 120), 0.0, 0.01, 0.01)
    other = scipy_bootstrap(
        (nats.mean(0), tokens),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        n_resamples=10_000,
        paired=True,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    mine = DocumentGaps("", tokens, dict(enumerate(nats))).interval(0.95)
    assert mine == pytest.approx((other.low, other.high), abs=0.04 * (other.high - other.low))


def test_means_over_arms_have_the_seeds_and_the_documents_that_all_have() -> None:
    tokens = np.array([10, 20])
    one = DocumentGaps("x", tokens, {1: np.array([1.0, 2.0]), 2: np.array([3.0, 4.0])})
    other = DocumentGaps("x", tokens, {2: np.array([5.0, 0.0])})
    both, apart = combined([one, other]), combined([one], [other])
    assert both is not None
    assert apart is not None
    assert {seed: list(nats) for seed, nats in both.nats.items()} == {2: [4.0, 2.0]}
    assert {seed: list(nats) for seed, nats in apart.nats.items()} == {2: [-2.0, 4.0]}
    assert combined([one, None]) is None
    assert combined([one, DocumentGaps("y", tokens, one.nats)]) is None
