"""The tests of a study's arms as one family: look by look, corrected for looks and for arms.

Two families, each with its own error rate alpha = 1 − confidence: the claims "differs from the
baseline" and the claims "equal within the margin". In each, an arm's p-value is the smallest
over the looks so far, corrected for the planned looks (`looks.py`), then for the number of arms
(`holm.py`). An arm that is decided at a look gets no further seeds, and its decision stands.

Why the chance of any false claim in a family stays below alpha, however the arms' seeds are
added: the smallest p-value over *all* planned looks, corrected, is a valid p-value, so Holm's
method on these keeps alpha. At every look the p-values here are no smaller, and Holm's method
rejects no more for larger p-values; so what is claimed at any look is claimed there too.

Controls are in neither family: they test the instrument, and their claims are not the study's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zpp_lab.config import StudyConfig
from zpp_lab.study import stats
from zpp_lab.study.holm import holm
from zpp_lab.study.looks import Sides, ever_below, look_sizes, planned_seeds


@dataclass(frozen=True)
class Entry:
    """One arm's data: gaps by seed (nats), the seeds whose runs have ended (with the
    baseline's), its margin in nats (None without a baseline), and whether it can be judged."""

    gaps: Mapping[int, float]
    ended: frozenset[int]
    margin: float | None
    member: bool  # of the families
    judged: bool = True  # False: diverged or failed; it gets no further seeds


@dataclass(frozen=True)
class PValues:
    """An arm's p-values: `differs` and `equal`, as they are and corrected. None: too few seeds.

    The plain ones are the smallest over the looks so far; `looks` says how many there were.
    """

    differs: float | None = None
    equal: float | None = None
    differs_corrected: float | None = None
    equal_corrected: float | None = None
    looks: int = 0

    def decided(self, alpha: float) -> bool:
        """Whether a claim can be made at level `alpha`."""
        return any(
            p is not None and p < alpha for p in (self.differs_corrected, self.equal_corrected)
        )


@dataclass(frozen=True)
class Replay:
    """The tests of every arm by name, and the seeds still to run at the present look."""

    tests: Mapping[str, PValues]
    missing: Mapping[str, Sequence[int]] = field(default_factory=dict)


def replay(study: StudyConfig, entries: Mapping[str, Entry]) -> Replay:
    """Go through the looks in order, as the study did or will.

    A look counts once all its runs have ended, so a study that was interrupted in the middle of
    one and goes on later decides as an undisturbed one. Only the first look may be judged
    early, with the seeds that there are.
    """
    sizes, seeds, alpha = look_sizes(study), planned_seeds(study), 1 - study.confidence
    open_arms = {name: entry for name, entry in entries.items() if entry.judged}
    history = {name: _History() for name in entries}
    tests = _corrected(entries, history, sizes)
    for look, size in enumerate(sizes):
        missing = {n: [s for s in seeds[:size] if s not in e.ended] for n, e in open_arms.items()}
        missing = {name: left for name, left in missing.items() if left}
        if missing and look > 0:
            return Replay(tests, missing)
        for name, entry in open_arms.items():
            history[name].look(entry, seeds[:size])
        tests = _corrected(entries, history, sizes)
        if missing:
            return Replay(tests, missing)
        open_arms = {n: e for n, e in open_arms.items() if not tests[n].decided(alpha)}
    return Replay(tests)


@dataclass
class _History:
    """The smallest p-values of one arm over the looks so far."""

    differs: float | None = None
    equal: float | None = None
    looks: int = 0
    as_planned: bool = True  # every look had all its seeds

    def look(self, entry: Entry, seeds: Sequence[int]) -> None:
        gaps = [entry.gaps[seed] for seed in seeds if seed in entry.gaps]
        self.looks += 1
        self.as_planned &= len(gaps) == len(seeds)
        if gaps and entry.margin:
            differs, equal = stats.p_values(gaps, entry.margin)
            self.differs = _smaller(self.differs, differs)
            self.equal = _smaller(self.equal, equal)

    def over_looks(self, p: float | None, sizes: tuple[int, ...], sides: Sides) -> float | None:
        """`p` corrected for the planned looks; where seeds are missing, by their number."""
        if p is None:
            return None
        return ever_below(p, sizes, sides) if self.as_planned else min(1.0, p * len(sizes))


def _corrected(
    entries: Mapping[str, Entry], history: Mapping[str, _History], sizes: tuple[int, ...]
) -> dict[str, PValues]:
    differs = {n: h.over_looks(h.differs, sizes, 2) for n, h in history.items()}
    equal = {n: h.over_looks(h.equal, sizes, 1) for n, h in history.items()}
    members = [name for name, entry in entries.items() if entry.member]
    for family in (differs, equal):
        family |= holm({name: family[name] for name in members})
    return {
        name: PValues(h.differs, h.equal, differs[name], equal[name], h.looks)
        for name, h in history.items()
    }


def _smaller(one: float | None, other: float | None) -> float | None:
    known = [p for p in (one, other) if p is not None]
    return min(known) if known else None
