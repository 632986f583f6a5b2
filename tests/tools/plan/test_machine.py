"""A machine's file: curves, what is refused, and the way to JSON and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.tools.plan.cost.machine import Curve, load_machine


@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e3)), min_size=1, max_size=6),
    st.floats(0, 1e13),
    st.floats(0, 1e13),
)
def test_more_never_takes_less(steps: list[tuple[float, float]], a: float, b: float) -> None:
    points, amount, seconds = [], 0.0, 0.0
    for more, longer in steps:
        amount, seconds = amount + more, seconds + longer
        points.append((amount, seconds))
    curve = Curve(tuple(points))
    low, high = sorted((a, b))
    assert curve.seconds(low) <= curve.seconds(high) * (1 + 1e-9)


@pytest.mark.parametrize(
    "points", [(), ((5.0, 1.0), (5.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((0.0, 1.0),)]
)
def test_curves_that_cannot_be(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"point|amounts|seconds"):
        Curve(points)


def test_mistakes_in_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    load_machine("h200").save(path)
    values = json.loads(path.read_text())
    for wrong, message in (
        (values | {"speed": 1}, "speed"),
        ({k: v for k, v in values.items() if k != "host"}, "host"),
        (values | {"memory_bytes_per_s": -1.0}, "memory_bytes_per_s"),
        (values | {"compute": {"fast": values["compute"]["eager"]}}, "compute"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            load_machine(str(path))
    with pytest.raises(ValueError, match="h200"):
        load_machine("no_such")
