"""Held-out losses by document, and how far a gap holds for other text and other seeds.

The losses are what heldout.json of a run folder holds. Folders of runs that wrote none are fine:
such an arm has no gap over documents.

The held-out loss is a ratio, nats over tokens, of the same documents for every run. Documents
are drawn again with replacement, an arm's and the baseline's together (a paired bootstrap of a
ratio; Efron & Tibshirani 1993, An Introduction to the Bootstrap). Every arm and seed of a study
sees the same draws, which come from a counter: the same files give the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy import special

from zpp_lab.files import HELDOUT, damaged
from zpp_lab.runs.reader import Run, read_json
from zpp_lab.study.judge.verdict import StudyResult, is_baseline

RESAMPLES = 10_000
_CHUNK = 1000
_KEY = 0x7A70702D626F6F74  # of the generator; any fixed number
_DOCUMENTS, _SEEDS = 0, 1  # which stream of it


@dataclass(frozen=True)
class Documents:
    """The held-out documents of one run after its last step.

    hash: of all inputs and targets; two runs with equal hashes can be compared document by
    document. places: int64 [D] in the held-out split; tokens: int64 [D]; nats: fp64 [D], sums of
    the tokens' losses.
    """

    hash: str
    places: np.ndarray
    tokens: np.ndarray
    nats: np.ndarray


def read_documents(folder: Path) -> Documents | None:
    """heldout.json of a run folder; None when there is none, ValueError when it is damaged."""
    found = read_json(folder / HELDOUT)
    if found is None:
        return None
    try:
        places, tokens = (np.asarray(found[key], np.int64) for key in ("documents", "tokens"))
        nats = np.asarray(found["nats"], np.float64)
        if not len(places) == len(tokens) == len(nats):
            raise ValueError("its lists differ in length")
        return Documents(str(found["hash"]), places, tokens, nats)
    except KeyError as error:
        raise damaged(folder / HELDOUT, f"no {error}") from None
    except (TypeError, ValueError) as error:
        raise damaged(folder / HELDOUT, error) from None


def document_gaps(result: StudyResult) -> dict[str, DocumentGap]:
    """Each arm's gap over documents by the arm's name, of the seeds whose pairs have documents.

    Arms whose runs wrote none, or too few, are absent.
    """
    read: dict[Path, Documents | None] = {}

    def documents(run: Run) -> Documents | None:
        if run.dir not in read:
            read[run.dir] = read_documents(run.dir)
        return read[run.dir]

    gaps = {}
    for arm in result.arms:
        if not is_baseline(result.study, arm.arm):
            base = result.baseline_of(arm)
            pairs = [(documents(arm.runs[s]), documents(base.runs[s])) for s in arm.gaps]
            gap = _gap(pairs, result.study.confidence)
            if gap is not None:
                gaps[arm.name] = gap
    return gaps


def _gap(
    pairs: list[tuple[Documents | None, Documents | None]], confidence: float
) -> DocumentGap | None:
    whole = [(a, b) for a, b in pairs if a is not None and b is not None and a.hash == b.hash]
    usable = [(a, b) for a, b in whole if a.hash == whole[0][0].hash and len(a.tokens) > 1]
    if not usable:
        return None
    nats = np.stack([a.nats - b.nats for a, b in usable])
    if not np.isfinite(nats).all():
        return None
    return document_gap(nats, usable[0][0].tokens, confidence)


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
