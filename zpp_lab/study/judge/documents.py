"""Held-out losses by document: what the choice of documents adds to the variance of a gap.

The losses come from heldout.json; an arm whose runs lack it has intervals over seeds alone. The
held-out loss is a ratio, nats over tokens, and its variance is that of the ratio's linear part.
Seeds and documents are crossed, so the spread of documents' mean gaps over S seeds holds 1/S of
the interaction, which the spread over seeds holds already. It is subtracted (two-way random model:
Searle, Casella & McCulloch 1992, Variance Components), but not with few documents: a difference of
two variances then has fewer degrees of freedom than it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zpp_lab.files import HELDOUT, damaged
from zpp_lab.runs.reader import Run, read_json
from zpp_lab.study.judge.stats import Part, part_interval

FEW = 10  # documents, counted as equally long ones; from there on the interaction is taken off


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
    """Read heldout.json of a run folder; None when there is none, ValueError when it is damaged."""
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
        raise damaged(folder / HELDOUT, f"{error} is missing") from None
    except (TypeError, ValueError) as error:
        raise damaged(folder / HELDOUT, error) from None


class Reader:
    """Reads each run's documents once; None for a run without them."""

    def __init__(self) -> None:
        self._read: dict[Path, Documents | None] = {}

    def of(self, run: Run) -> Documents | None:
        if run.dir not in self._read:
            self._read[run.dir] = read_documents(run.dir)
        return self._read[run.dir]

    def know(self, run: Run, documents: Documents) -> None:
        """Set the documents of a run without a folder, such as a simulated one."""
        self._read[run.dir] = documents

    def gaps(self, pairs: Mapping[int, tuple[Run, Sequence[Run]]]) -> DocumentGaps | None:
        """Return gaps by document. pairs: by seed an arm's run and its baseline's, whose mean
        counts. None where no seed's runs have the same documents, at least two."""
        first: Documents | None = None
        nats = {}
        for seed, (run, bases) in pairs.items():
            own, others = self.of(run), [self.of(base) for base in bases]
            if own is None or len(own.tokens) < 2 or own.hash != (first or own).hash:
                continue
            theirs = [other.nats for other in others if other and other.hash == own.hash]
            gap = own.nats - np.mean(theirs, axis=0) if len(theirs) == len(bases) else None
            if gap is not None and np.isfinite(gap).all():
                first, nats[seed] = first or own, gap
        return DocumentGaps(first.hash, first.tokens, nats) if first else None


@dataclass(frozen=True)
class DocumentGaps:
    """An arm's gaps by document, all of one set. tokens: int64 [D]; nats: of each seed fp64 [D],
    the arm's summed losses minus its baseline's."""

    hash: str
    tokens: np.ndarray
    nats: Mapping[int, np.ndarray]

    def part(self, seeds: Iterable[int]) -> Part | None:
        """Return what the choice of documents adds to the variance of the mean gap over `seeds`, as
        those of them with documents tell it; None where none has."""
        rows = [self.nats[seed] for seed in seeds if seed in self.nats]
        return document_part(np.stack(rows), self.tokens) if rows else None

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the interval of the mean gap of these runs on other documents."""
        nats = np.stack(list(self.nats.values()))
        part = document_part(nats, self.tokens, crossed=False)
        return part_interval(float(nats.mean(0).sum() / self.tokens.sum()), part, confidence)


def combined(
    added: Sequence[DocumentGaps | None], taken_off: Sequence[DocumentGaps | None] = ()
) -> DocumentGaps | None:
    """Return the mean over arms less that over others; None where documents differ."""
    known = [one for one in (*added, *taken_off) if one is not None]
    if len(known) < len(added) + len(taken_off) or len({one.hash for one in known}) != 1:
        return None
    signs = [1 / len(added)] * len(added) + [-1 / len(taken_off) for _ in taken_off]
    seeds = set.intersection(*(set(one.nats) for one in known))
    nats = {
        seed: np.sum([f * one.nats[seed] for f, one in zip(signs, known, strict=True)], axis=0)
        for seed in sorted(seeds)
    }
    return DocumentGaps(known[0].hash, known[0].tokens, nats) if nats else None


def document_part(nats: np.ndarray, tokens: np.ndarray, crossed: bool = True) -> Part:
    """Return the variance that the choice of documents makes in the mean gap, in (nats a token)².

    nats: fp64 [S, D]; tokens: [D], at least two. crossed: of seeds that are chosen too; else of
    these very runs. Its degrees of freedom are `count` less one. AssertionError for one document.
    """
    (seeds, documents), equal = nats.shape, count(tokens)
    assert documents > 1, "one document has no spread"
    total = tokens.sum()
    own, mean = nats.sum(1) / total, nats.mean(0)
    scale = documents / (documents - 1) / total**2
    variance = scale * np.square(mean - own.mean() * tokens).sum()
    if crossed and seeds > 1 and equal >= FEW:
        rest = nats - mean - np.outer(own - own.mean(), tokens)
        interaction = scale * np.square(rest).sum() / (seeds * (seeds - 1))
        variance = max(0.0, variance - interaction)
    return Part(float(variance), max(1.0, equal - 1))


def count(tokens: np.ndarray) -> float:
    """Return (Σ tokens)² / Σ tokens²: of as many documents of equal length these count for (Kish
    1965, Survey Sampling)."""
    return float(tokens.sum() ** 2 / np.square(tokens).sum())
