"""Upright boxes and straight segments in a plane: what lies inside, overlaps, is cut."""

from __future__ import annotations

import math

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top
Segment = tuple[float, float, float, float]  # x and y of the one end, then of the other


def inside(box: Box, width: float, height: float) -> bool:
    return box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height


def overlap(one: Box, other: Box) -> bool:
    """Whether they have more than an edge in common."""
    across = one[0] < other[2] and other[0] < one[2]
    return across and one[1] < other[3] and other[1] < one[3]


def box_distance(box: Box, point: Point) -> float:
    """From a point to the nearest one of the box; 0 inside."""
    x, y = point
    return math.hypot(max(box[0] - x, 0, x - box[2]), max(box[1] - y, 0, y - box[3]))


def cut(segment: Segment, box: Box) -> bool:
    """Whether a part of the segment lies in the box or on its edge."""
    x, y, to_x, to_y = segment
    first, last = 0.0, 1.0  # the part of the way that is inside of all edges so far
    for at, step, low, high in ((x, to_x - x, box[0], box[2]), (y, to_y - y, box[1], box[3])):
        if step == 0:
            if not low <= at <= high:
                return False
            continue
        one, other = sorted(((low - at) / step, (high - at) / step))
        first, last = max(first, one), min(last, other)
    return first <= last


def hits(one: Segment, other: Segment) -> bool:
    """Whether two segments that do not lie on one line meet."""
    return _apart(one, other) and _apart(other, one)


def _apart(line: Segment, ends: Segment) -> bool:
    """Whether the ends lie on both sides of the line, or on it."""
    x, y, to_x, to_y = line
    turns = [
        (to_x - x) * (at_y - y) - (to_y - y) * (at_x - x)
        for at_x, at_y in ((ends[0], ends[1]), (ends[2], ends[3]))
    ]
    return turns[0] * turns[1] <= 0
