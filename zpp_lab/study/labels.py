"""Places names beside points so that no two of them overlap; Vega-Lite cannot do it."""

from __future__ import annotations

from collections.abc import Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top

_CHARACTER, _LINE = 6.1, 12.0  # pixels of the labels' font
_MARK = 6.0  # half of a point's size in pixels


def place(
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    width: float,
    height: float,
    bars: Sequence[tuple[float, float]] = (),
) -> list[tuple[float, float] | None]:
    """Left middle of each label, in the points' pixels (y grows upwards), in the points' order.

    bars: bottom and top of each point's interval, which no label may cross.
    Greedy, first points first: a label takes the nearest free place around its point. None:
    all of its places are taken.
    """
    taken: list[Box] = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in points]
    taken += [(x - 1, low, x + 1, high) for (x, _), (low, high) in zip(points, bars, strict=False)]
    places: list[tuple[float, float] | None] = []
    for (x, y), name in zip(points, names, strict=True):
        boxes = [_box(at, name) for at in _candidates(x, y, _CHARACTER * len(name))]
        box = next((b for b in boxes if _inside(b, width, height) and not _hits(b, taken)), None)
        if box is not None:
            taken.append(box)
        places.append(None if box is None else (box[0], (box[1] + box[3]) / 2))
    return places


def _candidates(x: float, y: float, length: float) -> list[tuple[float, float]]:
    """Left middles around a point, nearest first."""
    right, left, centre = x + 8, x - 8 - length, x - length / 2
    near = [(right, y + 7), (left, y + 7), (right, y - 7), (left, y - 7), (centre, y + 16)]
    rows = [
        (side, y + sign * dy)
        for dy in (16, 28, 40, 52)
        for sign in (1, -1)
        for side in (centre, right, left)
    ]
    return near + rows


def _box(at: tuple[float, float], name: str) -> Box:
    x, y = at
    return x, y - _LINE / 2, x + _CHARACTER * len(name), y + _LINE / 2


def _inside(box: Box, width: float, height: float) -> bool:
    return box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height


def _hits(box: Box, others: Sequence[Box]) -> bool:
    return any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others)
