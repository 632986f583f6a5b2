"""Held-out losses by document: what heldout.json of a run folder holds, and gaps over documents.

Folders of runs that wrote none are fine: such an arm has no gap over documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zpp_lab.files import damaged
from zpp_lab.study.bootstrap import DocumentGap, document_gap
from zpp_lab.study.runs import HELDOUT, Run, read_json
from zpp_lab.study.verdict import StudyResult, is_baseline


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
