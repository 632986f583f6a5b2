"""The rows behind the names in the figures of gap against cost, in the units of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zpp_lab.study.boxes import Point, Segment
from zpp_lab.study.curves import Row
from zpp_lab.study.figure_rows import NARROW, PANEL
from zpp_lab.study.labels import Panel, place
from zpp_lab.study.style import GapAxis

PLACES = ("x", "y", "from_x", "from_y", "to_x", "to_y")


@dataclass(frozen=True)
class Costs:
    """One panel: its cost's field in the rows, from where to where its axis reaches, and the
    axis of gaps. sign: −1 where more of the cost is better."""

    key: str
    span: tuple[float, float]
    gaps: GapAxis
    sign: int = 1

    def pixel(self, row: Row, width: float) -> Point:
        """Where a row's point lies in a panel of this width."""
        across = (row[self.key] - self.span[0]) / (self.span[1] - self.span[0])
        return across * width, self.height(row["mean"])

    def height(self, gap: float) -> float:
        return self.gaps.place(gap) * PANEL[1]

    def value(self, at: Point, width: float) -> Point:
        """The inverse of `pixel`."""
        reach = self.span[1] - self.span[0]
        return self.span[0] + at[0] / width * reach, self.gaps.value(at[1] / PANEL[1])


def name_rows(
    rows: Sequence[Row], named: Sequence[str], front: Sequence[Row], costs: Costs
) -> list[Row]:
    """A row for each of the named arms: the places of its name and of both ends of its leader.

    The keys are PLACES, for a phone's panel with "narrow_" before them; those of the leader are
    left out where there is none, all where there is no room for the name. Names keep off the
    points and intervals of all `rows` and rather stand on neither the front nor the line at 0.
    """
    chosen = {row["arm"]: row for row in rows if row["arm"] in named}
    others = [row for row in rows if row["arm"] not in chosen]
    ordered = [*(chosen[arm] for arm in named if arm in chosen), *others]
    wide, narrow = (_places(ordered, len(chosen), front, costs, w) for w in (PANEL[0], NARROW))
    return [
        {"arm": row["arm"], "look": row["look"], **at}
        | {f"narrow_{key}": value for key, value in there.items()}
        for row, at, there in zip(ordered, wide, narrow, strict=False)
    ]


def _places(
    rows: Sequence[Row], names: int, front: Sequence[Row], costs: Costs, width: int
) -> list[Row]:
    zero = costs.height(0.0)
    panel = Panel(
        width,
        PANEL[1],
        [costs.pixel(row, width) for row in rows],
        [(costs.height(row["low"]), costs.height(row["high"])) for row in rows],
        [(0.0, zero, width, zero), *_steps(front, costs, width)],
    )
    found = []
    for label in place(panel, [row["arm"] for row in rows[:names]]):
        ends = [] if label is None else [label.at]
        if label is not None and label.leader is not None:
            ends += [label.leader[:2], label.leader[2:]]
        values = [value for end in ends for value in costs.value(end, width)]
        found.append(dict(zip(PLACES, values, strict=False)))
    return found


def _steps(front: Sequence[Row], costs: Costs, width: int) -> list[Segment]:
    """The front as it is drawn: each point's gap holds for those that cost more."""
    lines: list[Segment] = []
    for one, other in pairwise(costs.pixel(row, width) for row in front):
        corner = (other[0], one[1]) if costs.sign > 0 else (one[0], other[1])
        lines += [(*one, *corner), (*corner, *other)]
    return lines
