"""Places names around points so that each can be told to be its point's; Vega-Lite cannot do it.

A name stands beside its point where no other point is as near. Where there is no such place it
moves away, and a thin line, its leader, goes from the point to it. All coordinates are pixels of
the panel; y grows upwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zpp_lab.study.boxes import Box, Point, Segment, box_distance, cut, hits, inside, overlap

_WIDTHS = {  # pixels of the labels' characters, a little more than common fonts take
    **dict.fromkeys("iljI.,:;|!'", 3.3),
    **dict.fromkeys("frt-()[]/ ", 4.3),
    **dict.fromkeys("mwMW%@", 10.0),
}
_UPPER, _LOWER, _LINE = 8.2, 6.7, 12.0  # other characters, and a row
_MARK = 6.0  # half of a point's size
_AIR = 15.0  # from a name beside its point to any other point
_STRUCK = 40.0  # cost of a name that a line strikes through
_CROSSED = 14.0  # cost of an interval or a point that touches the own one on a leader's way
_FAR = 20.0  # cost of having a leader at all; its length comes on top
_ANGLES, _REACHES = 24, tuple(range(18, 260, 8))
_ROUNDS = 3  # in which each name may move when all others stand


@dataclass(frozen=True)
class Panel:
    """What names have to keep off.

    points: all points' middles. bars: bottom and top of each one's interval. lines: what a name
    rather does not cross.
    """

    width: float
    height: float
    points: Sequence[Point]
    bars: Sequence[tuple[float, float]] = ()
    lines: Sequence[Segment] = ()

    def mark(self, i: int) -> Box:
        x, y = self.points[i]
        return x - _MARK, y - _MARK, x + _MARK, y + _MARK

    @property
    def intervals(self) -> list[Box]:
        ends = zip(self.points, self.bars, strict=False)
        return [(x - 1.5, low, x + 1.5, high) for (x, _), (low, high) in ends]


@dataclass(frozen=True)
class Label:
    """Where a name stands, and the line from its point to it, if it has moved away."""

    box: Box
    leader: Segment | None = None

    @property
    def at(self) -> Point:
        """Its middle: texts are shorter in most fonts, and then lie in the middle of their box."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass
class _Placing:
    """The search's state: the label of each name, None where there is none yet."""

    panel: Panel
    labels: list[Label | None]
    found: dict[int, list[tuple[float, Label]]] = field(default_factory=dict)

    def best(self, i: int) -> Label | None:
        """The cheapest place of name i beside all labels that stand."""
        others = [one for k, one in enumerate(self.labels) if one is not None and k != i]
        free = (one for _, one in self.found[i] if not any(_clash(one, o) for o in others))
        return next(free, None)

    def make_room(self, i: int) -> None:
        """Places name i by moving one that stands, if there is one for which both find room."""
        for k, old in enumerate(self.labels):
            if old is None:
                continue
            self.labels[k] = None
            self.labels[i] = self.best(i)
            self.labels[k] = self.best(k)
            if self.labels[i] is not None and self.labels[k] is not None:
                return
            self.labels[i], self.labels[k] = None, old


def place(panel: Panel, names: Sequence[str]) -> list[Label | None]:
    """A label for each name; they are those of the panel's first points, in that order.

    Labels, points and intervals do not overlap and no leader crosses another label or leader.
    Same panel and names, same labels. None: there is no room for it at all.
    """
    state = _Placing(panel, [None] * len(names))
    for i, name in enumerate(names):
        state.found[i] = sorted(_places(panel, i, name), key=lambda pair: pair[0])
    # First what can stand beside its point, where it has least choice; then those with leaders.
    choice = [sum(label.leader is None for _, label in state.found[i]) for i in range(len(names))]
    order = sorted(range(len(names)), key=lambda i: (choice[i] == 0, choice[i]))
    for _ in range(_ROUNDS):
        before = list(state.labels)
        for i in order:
            state.labels[i] = state.best(i)
        for i in order:
            if state.labels[i] is None:
                state.make_room(i)
        if state.labels == before:
            break
    return state.labels


def width(name: str) -> float:
    """About the pixels of a name, rather more than less."""
    return sum(_WIDTHS.get(c, _UPPER if c.isupper() else _LOWER) for c in name)


def _places(panel: Panel, i: int, name: str) -> Iterator[tuple[float, Label]]:
    """(cost, label) of all places that points and intervals leave to name i."""
    marks = [panel.mark(k) for k in range(len(panel.points))]
    blocked = [*marks, *panel.intervals]
    for cost, label in (*_beside(panel, i, name), *_away(panel, i, name)):
        box = label.box
        if inside(box, panel.width, panel.height) and not any(overlap(box, b) for b in blocked):
            crossed = sum(cut(line, box) for line in panel.lines)
            more = _leader_cost(panel, i, label, marks)
            if more is not None:
                yield cost + _STRUCK * min(1, crossed) + more, label


def _beside(panel: Panel, i: int, name: str) -> Iterator[tuple[float, Label]]:
    """Places at the point itself, unless another point is near them."""
    x, y = panel.points[i]
    length = width(name)
    right, left, middle = x + 8, x - 8 - length, x - length / 2
    spots = [(right, y + 7), (left, y + 7), (right, y - 7), (left, y - 7), (middle, y + 15)]
    spots += [(middle, y - 15), (right, y), (left, y)]
    others = [point for k, point in enumerate(panel.points) if k != i]
    for rank, spot in enumerate(spots):
        box = _box(spot, length)
        if all(box_distance(box, point) >= _AIR for point in others):
            yield float(rank), Label(box)


def _away(panel: Panel, i: int, name: str) -> Iterator[tuple[float, Label]]:
    """Places around the point at growing distances, each with its leader."""
    x, y = panel.points[i]
    length = width(name)
    for reach in _REACHES:
        for turn in range(_ANGLES):
            angle = 2 * math.pi * turn / _ANGLES
            across, up = math.cos(angle), math.sin(angle)
            end = x + reach * across, y + reach * up
            if abs(across) < 0.3:
                spot = end[0] - length / 2, end[1] + math.copysign(_LINE / 2 + 1, up)
            else:
                spot = end[0] + 2 if across > 0 else end[0] - 2 - length, end[1]
            start = x + (_MARK - 1) * across, y + (_MARK - 1) * up
            steep = 3 * abs(up * across)  # of two ways as long, the one along an axis
            yield _FAR + 0.4 * reach + steep, Label(_box(spot, length), (*start, *end))


def _leader_cost(panel: Panel, i: int, label: Label, marks: Sequence[Box]) -> float | None:
    """What the leader crosses, and how near its name comes to others' points; None: too much."""
    if label.leader is None:
        return 0.0
    cost = 0.0
    for k, mark in enumerate(marks):
        if k == i:
            continue
        if cut(label.leader, mark):
            if not overlap(mark, marks[i]):
                return None
            cost += _CROSSED
        cost += max(0.0, _AIR - box_distance(label.box, panel.points[k]))
    upright = abs(label.leader[2] - label.leader[0]) < 3  # hardly seen on an interval
    crossed = sum(cut(label.leader, interval) for interval in panel.intervals)
    return cost + (_STRUCK if upright else _CROSSED) * crossed


def _box(at: Point, length: float) -> Box:
    x, y = at
    return x, y - _LINE / 2, x + length, y + _LINE / 2


def _clash(one: Label, other: Label) -> bool:
    if overlap(one.box, other.box):
        return True
    for a, b in ((one, other), (other, one)):
        if a.leader is not None and cut(a.leader, b.box):
            return True
    return one.leader is not None and other.leader is not None and hits(one.leader, other.leader)
