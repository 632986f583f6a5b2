"""The Pareto front: arms that no other arm beats in both loss gap and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def front(points: Sequence[tuple[float, float, T]]) -> list[T]:
    """What is not dominated, by rising cost. points: (cost, gap, what), less is better in both.

    A point is dominated when another one is no worse in both and better in one. Of points that
    are alike in both, all stay. Points without a number (NaN) are on no front.
    """
    known = sorted((p for p in points if p[0] == p[0] and p[1] == p[1]), key=lambda p: p[:2])
    kept: list[T] = []
    best = float("inf")
    at = float("nan")
    for cost, gap, what in known:
        if gap < best or (gap == best and cost == at):
            kept.append(what)
            best, at = gap, cost
    return kept
