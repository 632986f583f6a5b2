"""Looking at a study more than once without being fooled more often: looks and their correction.

A sequential study tests after its first seeds, then after every few more. Each further look is
another chance to cross a threshold by luck. The correction is Pocock's (1977, Biometrika 64):
the same nominal level at every look, lowered until the chance of ever crossing it is the level
that was promised. For a t test that level has no closed form, but the t statistics of the looks
depend on no unknown when the null holds, so their joint distribution is simulated here once,
for exactly the numbers of seeds that the study plans.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

from zpp_lab.config import StudyConfig

Sides = Literal[1, 2]
_PATHS, _CHUNK = 100_000, 10_000
_KEY = 0x7A70702D6C6F6F6B  # of the generator; any fixed number


def planned_seeds(study: StudyConfig) -> list[int]:
    """All seeds that the study may run, in the order in which they are added.

    After `study.seeds` follow the integers above the largest of them, up to `study.max_seeds`.
    """
    more = max(0, study.max_seeds - len(study.seeds))
    start = max(study.seeds) + 1
    return [*study.seeds, *range(start, start + more)]


def look_sizes(study: StudyConfig) -> tuple[int, ...]:
    """Seeds of an arm at each look: len(study.seeds), then seeds_per_look more at a time."""
    first, last = len(study.seeds), len(planned_seeds(study))
    return (*range(first, last, study.seeds_per_look), last)


def ever_below(p: float, sizes: tuple[int, ...], sides: Sides) -> float:
    """Chance, without any effect, that the smallest p-value over the looks is `p` or less.

    sizes: seeds at each look. sides: 2 for "differs", 1 for one side of the equivalence test.
    This is the p-value of the whole sequence; never above `p` times the number of looks.
    """
    tested = _tested(sizes)
    if len(tested) < 2:
        return p
    smallest = _smallest(tested, sides)
    count = int(np.searchsorted(smallest, p, side="right"))
    return float(min(1.0, p * len(tested), max(p, (count + 1) / (smallest.size + 1))))


def nominal_level(alpha: float, sizes: tuple[int, ...], sides: Sides) -> float:
    """The level for each look at which the whole sequence errs with probability `alpha`."""
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
