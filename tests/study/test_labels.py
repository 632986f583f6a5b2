"""Names beside points: none overlaps, each is its own point's, and all stay in the panel."""

from __future__ import annotations

import math
import random
from itertools import combinations
from pathlib import Path

import pytest

from tests.study.fake_sweep import grid, write_sweep
from zpp_lab.study.boxes import box_distance, cut, hits, inside, overlap
from zpp_lab.study.cost_figures import bytes_figure
from zpp_lab.study.figure_rows import NARROW, PANEL
from zpp_lab.study.label_rows import PLACES, Costs, name_rows
from zpp_lab.study.labels import Label, Panel, place
from zpp_lab.study.palette import study_looks
from zpp_lab.study.result import read_result
from zpp_lab.study.style import GapAxis, Style

# Eleven arms of a study as they lay in a panel: two near-equal pairs, and four in a row.
NAMES = ("zero3", "zero3_reordered", "w4", "g8", "g4", "w4g4", "qsdp", "zeropp", "g8_4_hadamard")
NAMES += ("w4_g84h", "broken")
POINTS = [(334.0, 66.0), (334.0, 66.1), (169.0, 71.0), (279.0, 66.5), (251.0, 83.0), (85.0, 89.0)]
POINTS += [(170.0, 66.6), (130.0, 98.0), (273.0, 81.0), (102.0, 83.5), (41.0, 328.0)]
BARS = [(y - 3.0, y + 3.0) for _, y in POINTS]
BARS[2] = 52.0, 87.0


def found(panel: Panel, names: tuple[str, ...] | list[str]) -> list[Label]:
    labels = place(panel, names)
    assert None not in labels
    return [label for label in labels if label is not None]


def all_apart(panel: Panel, labels: list[Label]) -> None:
    """No name lies on another one, on a point, an interval or a leader, or leaves the panel."""
    for label in labels:
        assert inside(label.box, panel.width, panel.height)
        assert not any(overlap(label.box, panel.mark(i)) for i in range(len(panel.points)))
        assert not any(overlap(label.box, interval) for interval in panel.intervals)
    for one, other in combinations(labels, 2):
        assert not overlap(one.box, other.box)
        for a, b in ((one, other), (other, one)):
            assert a.leader is None or not cut(a.leader, b.box)
        assert one.leader is None or other.leader is None or not hits(one.leader, other.leader)


def told(panel: Panel, labels: list[Label]) -> None:
    """A name without a leader is nearest to its own point; a leader goes from point to name."""
    for i, label in enumerate(labels):
        near = [box_distance(label.box, point) for point in panel.points]
        if label.leader is None:
            assert near[i] < 13
            assert min([d for k, d in enumerate(near) if k != i], default=99.0) >= 15
        else:
            assert math.dist(label.leader[:2], panel.points[i]) < 6
            assert box_distance(label.box, label.leader[2:]) < 3


@pytest.mark.parametrize("width", [PANEL[0], NARROW])
def test_names_of_a_crowded_study_stay_apart(width: int) -> None:
    points = [(x / PANEL[0] * width, y) for x, y in POINTS]
    panel = Panel(width, PANEL[1], points, BARS, [(0, 66, width, 66)])
    labels = found(panel, NAMES)
    all_apart(panel, labels)
    told(panel, labels)
    struck = [name for name, one in zip(NAMES, labels, strict=True) if cut(panel.lines[0], one.box)]
    assert not struck


@pytest.mark.parametrize("seed", range(8))
def test_names_of_any_twenty_points_stay_apart(seed: int) -> None:
    draw = random.Random(seed)
    points = [(draw.uniform(5, 350), draw.uniform(5, 335)) for _ in range(20)]
    bars = [(y - draw.uniform(0, 30), y + draw.uniform(0, 30)) for _, y in points]
    panel = Panel(*PANEL, points, bars)
    names = [f"w{i}_g84h" for i in range(20)]
    labels = found(panel, names)
    all_apart(panel, labels)
    told(panel, labels)
    assert place(panel, names) == labels  # the same again


def test_a_lone_name_stands_beside_its_point() -> None:
    (label,) = found(Panel(355, 340, [(100.0, 100.0)]), ["w4"])
    assert label.leader is None
    (label,) = found(Panel(355, 340, [(352.0, 3.0)]), ["zero3_reordered"])
    assert inside(label.box, 355, 340)


def test_points_without_names_are_kept_off_too() -> None:
    others = [(100.0 + dx, 100.0 + dy) for dx in (-20, 0, 20) for dy in (-14, 14)]
    panel = Panel(355, 340, [(100.0, 100.0), *others])
    labels = found(panel, ["w4_g84h"])
    assert labels[0].leader is not None
    all_apart(panel, labels)


def test_a_name_without_room_is_left_out() -> None:
    crowd = place(Panel(100, 100, [(50.0, 50.0)] * 30), ["a name"] * 30)
    assert None in crowd
    all_apart(Panel(100, 100, []), [label for label in crowd if label is not None])


def test_rows_hold_the_places_in_the_units_of_the_axes() -> None:
    gaps = GapAxis.around(0.0045, -0.001, 1.4)
    costs = Costs("bytes", (0.0, 1.06), gaps)
    gap = {"zero3": 0.0, "zero3_reordered": 0.00001, "w4": 0.0003, "broken": 1.35}
    share = {"zero3": 1.0, "zero3_reordered": 1.0, "w4": 0.5, "broken": 0.1}
    rows = [
        {"arm": arm, "look": arm, "bytes": share[arm], "mean": gap[arm], "low": gap[arm] - 1e-4}
        | {"high": gap[arm] + 1e-4}
        for arm in gap
    ]
    named = name_rows(rows, ["w4", "zero3", "zero3_reordered"], rows[:1], costs)
    assert [row["arm"] for row in named] == ["w4", "zero3", "zero3_reordered"]
    assert named == name_rows(rows, ["w4", "zero3", "zero3_reordered"], rows[:1], costs)
    assert {key for row in named for key in row} == {
        *("arm", "look", *PLACES),
        *(f"narrow_{key}" for key in PLACES),
    }
    assert "from_x" not in named[0]
    for row in named:
        assert 0 <= row["x"] <= 1.06
        assert gaps.low <= row["y"] <= gaps.high
        if "from_x" in row:
            start = costs.pixel({"bytes": row["from_x"], "mean": row["from_y"]}, PANEL[0])
            own = costs.pixel(next(r for r in rows if r["arm"] == row["arm"]), PANEL[0])
            assert math.dist(start, own) < 6
    assert all("from_x" in row for row in named[1:])  # at one point
    for row in rows:
        assert costs.value(costs.pixel(row, 355), 355) == pytest.approx((row["bytes"], row["mean"]))


@pytest.mark.parametrize(("bits", "legend"), [((8,), False), ((2, 4, 6, 8), True)])
def test_a_legend_tells_what_names_cannot(
    bits: tuple[int, ...], legend: bool, tmp_path: Path
) -> None:
    write_sweep(tmp_path, grid(bits, (32, 64), (True, False), ("nearest",)), seeds=2, steps=20)
    result = read_result(tmp_path)
    spec = bytes_figure(result, Style(study_looks(result.study), result.study.baseline))
    missing = [r for key, rows in spec["datasets"].items() if "_names" in key for r in rows]
    assert any("x" not in row for row in missing) == legend
    colors = [layer["encoding"].get("color") for one in spec["concat"] for layer in one["layer"]]
    legends = [color["legend"] for color in colors if color and "field" in color]
    assert legends
    assert all((one is not None) == legend for one in legends)
