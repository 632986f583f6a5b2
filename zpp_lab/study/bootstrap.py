"""How far a gap holds for other text, and for other text and other seeds at once.

The held-out loss is a ratio, nats over tokens, of the same documents for every run. Documents
are drawn again with replacement, an arm's and the baseline's together (a paired bootstrap of a
ratio; Efron & Tibshirani 1993, An Introduction to the Bootstrap). Every arm and seed of a study
sees the same draws, which come from a counter: the same files give the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

RESAMPLES = 10_000
_CHUNK = 1000
_KEY = 0x7A70702D626F6F74  # of the generator; any fixed number
_DOCUMENTS, _SEEDS = 0, 1  # which stream of it


@dataclass(frozen=True)
class DocumentGap:
    """A gap in nats per token with its intervals over documents.

    `interval`: documents drawn again, these seeds (percentiles). `both`: seeds and documents
    drawn again; None for a single seed.
    """

    documents: int
    seeds: int
    mean: float
    interval: tuple[float, float]
    both: tuple[float, float] | None = None


def document_gap(nats: np.ndarray, tokens: np.ndarray, confidence: float = 0.95) -> DocumentGap:
    """The gap's intervals over documents.

    nats: fp64 [seeds, documents], an arm's summed losses minus its baseline's of the same seed.
    tokens: [documents], at least two. Raises AssertionError for fewer.
    """
    seeds, documents = nats.shape
    assert documents > 1, "one document cannot be drawn again"
    weights = draws(documents, documents, _DOCUMENTS)
    by_seed = (weights @ nats.T) / (weights @ tokens)[:, None]  # fp64 [RESAMPLES, seeds]
    low, high = np.quantile(by_seed.mean(1), [(1 - confidence) / 2, (1 + confidence) / 2])
    own = nats.sum(1) / tokens.sum()
    both = _over_both(by_seed, own, documents, confidence) if seeds > 1 else None
    return DocumentGap(documents, seeds, float(own.mean()), (float(low), float(high)), both)


def _over_both(
    by_seed: np.ndarray, own: np.ndarray, documents: int, confidence: float
) -> tuple[float, float]:
    """Seeds and documents drawn independently (Owen 2007, Ann. Appl. Stat. 1).

    Of S seeds S − 1 are drawn, which makes the variance over few seeds right (McCarthy & Snowden
    1985), and the interval is Student's with Satterthwaite's degrees of freedom, as percentiles
    of few seeds are too narrow. by_seed: [RESAMPLES, S]; own: [S] gaps of all documents.
    """
    seeds = len(own)
    chosen = draws(seeds, seeds - 1, _SEEDS) / (seeds - 1)
    error = (chosen * by_seed).sum(1).std()
    of_seeds, of_documents = own.var(ddof=1) / seeds, by_seed.mean(1).var()
    total = of_seeds + of_documents
    if total == 0:
        return float(own.mean()), float(own.mean())
    freedom = total**2 / (of_seeds**2 / (seeds - 1) + of_documents**2 / (documents - 1))
    half = special.stdtrit(freedom, (1 + confidence) / 2) * error
    return float(own.mean() - half), float(own.mean() + half)


@lru_cache(maxsize=8)
def draws(things: int, drawn: int, stream: int) -> np.ndarray:
    """How often each thing is drawn: fp64 [RESAMPLES, things], each row adds up to `drawn`."""
    counts = np.empty((RESAMPLES, things))
    for first in range(0, RESAMPLES, _CHUNK):
        rng = np.random.Philox(key=_KEY, counter=[0, first, things, stream])
        picks = rng.random_raw(_CHUNK * drawn).reshape(_CHUNK, drawn) % np.uint64(things)
        flat = picks + (np.arange(_CHUNK, dtype=np.uint64) * np.uint64(things))[:, None]
        tally = np.bincount(flat.ravel().astype(np.int64), minlength=_CHUNK * things)
        counts[first : first + _CHUNK] = tally.reshape(_CHUNK, things)
    return counts
