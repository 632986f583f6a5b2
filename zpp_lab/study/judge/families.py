"""The tests of a study's arms as one family: look by look, corrected for looks and for arms.

Three families, each with its own error rate alpha = 1 − confidence: a gap differs from 0, it is
equal within the margin, it lies beyond the margin. An arm's p-value is the smallest over the looks
so far, corrected for the planned looks, then for the number of arms (Holm). An arm that a look
shows inside or beyond the margin gets no further seeds, and its claims stand. Controls whose
verdict is known are in no family.

Looks: each further look is another chance to cross a threshold by luck. The correction is Pocock's
(1977, Biometrika 64): the same nominal level at every look, lowered until the chance of ever
crossing it is alpha. For a t test it has no closed form, but the t statistics of the looks depend
on no unknown when the null holds, so their joint distribution is simulated for the planned seeds.

Arms: Holm's method is written out, because statsmodels takes seconds to import; tests compare both.

The chance of any false claim in a family stays below alpha, however seeds are added: the smallest
p-value over *all* planned looks, corrected, is a valid p-value, so Holm's method on these keeps
alpha. At every look the p-values here are no smaller, and Holm's method rejects no more for larger
ones. A composite asks for no seeds: it is tested at the looks that all its arms have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Literal

import numpy as np
from scipy import special

from zpp_lab.config.study import StudyConfig
from zpp_lab.study.judge import stats
from zpp_lab.study.judge.documents import DocumentGaps

Sides = Literal[1, 2]
_SIDES: tuple[Sides, ...] = (2, 1, 2)  # of the tests, in the order of `stats.Tests`
_UNKNOWN = (None, None, None)
_PATHS, _CHUNK = 100_000, 10_000
_KEY = 0x7A70702D6C6F6F6B  # of the generator; any fixed number


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return corrected p-values by name (Holm 1979, Scand. J. Stat. 6).

    An arm without a p-value yet stays None, and counts in the family as if it were 1: the
    correction does not change when its runs come in.
    """
    values = np.array([1.0 if p is None else p for p in p_values.values()])
    order = np.argsort(values)
    steps = values[order] * np.arange(values.size, 0, -1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    pairs = zip(p_values.items(), corrected, strict=True)
    return {name: None if p is None else float(c) for (name, p), c in pairs}


def turns(p_values: Mapping[str, float | None], alpha: float) -> dict[str, int]:
    """Return by how much Holm's method divides `alpha` when it comes to each name: by those that
    are left until one is not below its share, then by those left there for all others. A p-value is
    below alpha over its turn exactly when the corrected one is below alpha."""
    found, left = {}, len(p_values)
    for name, p in sorted(p_values.items(), key=lambda item: 1.0 if item[1] is None else item[1]):
        found[name] = left
        left -= p is not None and p * left < alpha
    return found


def planned_seeds(study: StudyConfig) -> list[int]:
    """Return all seeds that the study may run, in the order in which they are added.

    After `study.seeds` follow the integers above the largest of them, up to `study.max_seeds`.
    """
    more = max(0, study.max_seeds - len(study.seeds))
    start = max(study.seeds) + 1
    return [*study.seeds, *range(start, start + more)]


def look_sizes(study: StudyConfig) -> tuple[int, ...]:
    """Return an arm's seeds at each look: len(study.seeds), then seeds_per_look more."""
    first, last = len(study.seeds), len(planned_seeds(study))
    return (*range(first, last, study.seeds_per_look), last)


def ever_below(p: float, sizes: tuple[int, ...], sides: Sides) -> float:
    """Return the chance, without any effect, that the smallest p-value over the looks is `p` or
    less.

    sizes: seeds at each look. sides: 1 for one side of the equivalence test, 2 for the others.
    This is the p-value of the whole sequence; never above `p` times the number of looks.
    """
    tested = _tested(sizes)
    if len(tested) < 2:
        return p
    smallest = _smallest(tested, sides)
    count = int(np.searchsorted(smallest, p, side="right"))
    return float(min(1.0, p * len(tested), max(p, (count + 1) / (smallest.size + 1))))


def nominal_level(alpha: float, sizes: tuple[int, ...], sides: Sides) -> float:
    """Return the level for each look at which the whole sequence errs with probability `alpha`."""
    tested = _tested(sizes)
    if len(tested) < 2:
        return alpha
    smallest = _smallest(tested, sides)
    place = int(alpha * (smallest.size + 1)) - 1
    return float(max(smallest[max(place, 0)] if place >= 0 else 0.0, alpha / len(tested)))


def _tested(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A single seed has no test."""
    return tuple(n for n in sizes if n > 1)


@lru_cache(maxsize=64)
def _smallest(sizes: tuple[int, ...], sides: Sides) -> np.ndarray:
    """The smallest p-value of simulated sequences without an effect, sorted, fp64 [_PATHS]."""
    chunks = range(_PATHS // _CHUNK)
    return np.sort(np.concatenate([_simulate(sizes, sides, chunk) for chunk in chunks]))


def _simulate(sizes: tuple[int, ...], sides: Sides, chunk: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(key=_KEY, counter=[0, 0, 0, chunk]))
    values = rng.standard_normal((_CHUNK, sizes[-1]))
    sums, squares = values.cumsum(1), np.square(values).cumsum(1)
    smallest = np.ones(_CHUNK)
    for n in sizes:
        total = sums[:, n - 1]
        t = total / np.sqrt((n * squares[:, n - 1] - total**2) / (n - 1))
        tail = special.stdtr(n - 1, -np.abs(t) if sides == 2 else t)
        np.minimum(smallest, sides * tail, out=smallest)
    return smallest


@dataclass(frozen=True)
class Entry:
    """One arm's data: gaps by seed (nats), the seeds whose runs have ended (with the
    baseline's), its margin in nats (None without a baseline), and whether it can be judged."""

    gaps: Mapping[int, float]
    ended: frozenset[int]
    margin: float | None
    member: bool  # of the families
    judged: bool = True  # False: diverged or failed; it gets no further seeds
    documents: DocumentGaps | None = None
    asks: bool = True  # False: a composite, tested at the looks that its arms have


@dataclass(frozen=True)
class PValues:
    """An arm's p-values of the three claims, as they are and corrected. None: too few seeds.

    The plain ones are the smallest over the looks so far, of differs and beyond over those since
    the mean last changed its side; `looks` says how many there were. `levels`: what the plain ones
    are compared with, after both corrections: a corrected one is below alpha where the plain one is
    below its level.
    """

    differs: float | None = None
    equal: float | None = None
    beyond: float | None = None
    differs_corrected: float | None = None
    equal_corrected: float | None = None
    beyond_corrected: float | None = None
    looks: int = 0
    levels: tuple[float, ...] = ()

    def decided(self, alpha: float) -> bool:
        """Return whether the gap is known to be inside or beyond the margin, at level `alpha`."""
        return any(
            p is not None and p < alpha for p in (self.beyond_corrected, self.equal_corrected)
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
    tests = _corrected(entries, history, sizes, alpha)
    for look, size in enumerate(sizes):
        lacking = {n: [s for s in seeds[:size] if s not in e.ended] for n, e in open_arms.items()}
        missing = {n: left for n, left in lacking.items() if left and entries[n].asks}
        if missing and look > 0:
            return Replay(tests, missing)
        for name, entry in open_arms.items():
            if look == 0 or not lacking[name]:
                history[name].look(entry, seeds[:size])
        tests = _corrected(entries, history, sizes, alpha)
        if missing:
            return Replay(tests, missing)
        open_arms = {n: e for n, e in open_arms.items() if not tests[n].decided(alpha)}
    return Replay(tests)


@dataclass
class _History:
    """The smallest p-values of one arm over the looks so far.

    Where the mean changes its side, those of claims that have one, "differs" and "beyond", begin
    again: an earlier look spoke of the other side.
    """

    tests: stats.Tests | None = None
    above: bool = True  # the mean at the last look
    looks: int = 0
    as_planned: bool = True  # every look had all its seeds

    def look(self, entry: Entry, seeds: Sequence[int]) -> None:
        gaps = {seed: entry.gaps[seed] for seed in seeds if seed in entry.gaps}
        self.looks += 1
        self.as_planned &= len(gaps) == len(seeds)
        if not gaps or not entry.margin:
            return
        documents = entry.documents.part(gaps) if entry.documents else None
        found = stats.p_values(list(gaps.values()), entry.margin, documents)
        if found is not None:
            above, before = fmean(gaps.values()) > 0, self.tests or found
            if above != self.above:
                before = before._replace(differs=1.0, beyond=1.0)
            self.above = above
            self.tests = stats.Tests(*map(min, found, before))

    def over_looks(self, sizes: tuple[int, ...]) -> list[float | None]:
        """Return corrected for the planned looks; where seeds are missing, by their number."""
        if self.tests is None:
            return list(_UNKNOWN)
        if not self.as_planned:
            return [min(1.0, p * len(sizes)) for p in self.tests]
        return [ever_below(p, sizes, sides) for p, sides in zip(self.tests, _SIDES, strict=True)]

    def level(self, alpha: float, sizes: tuple[int, ...], sides: Sides) -> float:
        """Return the limit of a plain p-value at which the one over looks is `alpha`."""
        return nominal_level(alpha, sizes, sides) if self.as_planned else alpha / len(sizes)


def _corrected(
    entries: Mapping[str, Entry],
    history: Mapping[str, _History],
    sizes: tuple[int, ...],
    alpha: float,
) -> dict[str, PValues]:
    over_looks = {name: h.over_looks(sizes) for name, h in history.items()}
    families = [{name: found[i] for name, found in over_looks.items()} for i in range(len(_SIDES))]
    divided: list[dict[str, int]] = []
    for family in families:
        members = {name: family[name] for name, entry in entries.items() if entry.member}
        divided.append(turns(members, alpha))
        family |= holm(members)
    found = {}
    for name, h in history.items():
        differs, equal, beyond = (family[name] for family in families)
        shares = [alpha / by.get(name, 1) for by in divided]
        levels = [h.level(a, sizes, sides) for a, sides in zip(shares, _SIDES, strict=True)]
        plain = h.tests or _UNKNOWN
        found[name] = PValues(
            plain[0], plain[1], plain[2], differs, equal, beyond, h.looks, tuple(levels)
        )
    return found
