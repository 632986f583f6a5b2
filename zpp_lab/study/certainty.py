"""How sure a study is of its gaps: p-values, intervals over documents, the noise floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zpp_lab.study.band import band_lines
from zpp_lab.study.bootstrap import DocumentGap
from zpp_lab.study.documents import document_gaps
from zpp_lab.study.noise import NoiseFloor, noise_floors
from zpp_lab.study.table import NOTHING, P_VALUE_COLUMNS, p_value_rows, signed
from zpp_lab.study.verdict import StudyResult

COLUMNS = (*P_VALUE_COLUMNS, "Gap, other documents", "Gap, other documents and seeds")


@dataclass(frozen=True)
class Certainty:
    """documents: gaps over documents by arm; floors: one a baseline with two seeds or more."""

    result: StudyResult
    documents: Mapping[str, DocumentGap]
    floors: Sequence[NoiseFloor]

    def rows(self) -> list[list[str]]:
        """COLUMNS as text, one row an arm but baselines."""
        return [[*row, *self._intervals(row[0])] for row in p_value_rows(self.result)]

    def lines(self) -> list[str]:
        """Sentences on the intervals and on the noise floor."""
        noise = [line for floor in self.floors for line in floor.lines] + band_lines(self.result)
        if not self.documents:
            return noise
        counts = sorted({gap.documents for gap in self.documents.values()})
        return [
            f"Other documents: {self.result.study.confidence:.0%} intervals of the gap when the "
            f"{' or '.join(map(str, counts))} held-out documents are drawn again, with the same "
            "seeds and with seeds drawn again too (bootstrap); corrected neither for arms nor for "
            "looks.",
            *noise,
        ]

    def _intervals(self, arm: str) -> tuple[str, str]:
        gap = self.documents.get(arm)
        return (NOTHING, NOTHING) if gap is None else (_range(gap.interval), _range(gap.both))


def certainty(result: StudyResult) -> Certainty:
    """Reads heldout.json of every run."""
    return Certainty(result, document_gaps(result), noise_floors(result))


def _range(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return NOTHING
    return f"{signed(interval[0])} to {signed(interval[1])}"
