"""metrics.jsonl: nothing is lost, nothing is half there, every float comes back."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.runs.metrics import MetricsLog, Tail, decode, encode, from_json, read, to_json


def fill(path: Path, steps: int) -> MetricsLog:
    log = MetricsLog(path)
    for step in range(1, steps + 1):
        log.append({"step": step, "loss": 5.0 / step})
    return log


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@given(st.floats(), st.integers())
def test_every_number_comes_back(value: float, number: int) -> None:
    back = decode(encode({"step": number, "deep": {"list": [value], "x": value}}))
    assert back["step"] == number
    assert same(back["deep"]["x"], value)
    assert same(back["deep"]["list"][0], value)


def test_special_floats_are_strings_in_the_file() -> None:
    line = encode({"a": math.nan, "b": math.inf, "c": -math.inf})
    assert line == b'{"a":"NaN","b":"Infinity","c":"-Infinity"}\n'
    assert math.isnan(from_json(to_json({"a": math.nan}, indent=1))["a"])


def test_a_step_must_follow_the_last_one(tmp_path: Path) -> None:
    log = fill(tmp_path / "m.jsonl", 3)
    with pytest.raises(AssertionError, match="step 3 after step 3"):
        log.append({"step": 3})


@pytest.mark.parametrize("torn", [b'{"step":4,"lo', b'{"step":4,"loss":1}', b'{"step":4,"lo\n'])
def test_a_torn_last_line_is_passed_over_and_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    fill(path, 3).close()
    with open(path, "ab") as file:
        file.write(torn)
    assert len(read(path)) == 3
    log = MetricsLog(path)
    assert log.truncate_after(10)[-1]["step"] == 3
    log.append({"step": 4, "loss": 0.5})
    assert read(path)[-1] == {"step": 4, "loss": 0.5}
    assert path.read_bytes().count(b"\n") == 4


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"line 2 .*run\.resume=false"):
        read(path)
    path.write_bytes(b'{"st\n{"step":3')  # a torn line excuses no broken line before it
    with pytest.raises(ValueError, match="line 1"):
        read(path)


@pytest.mark.parametrize("steps", [[1, 3, 3], [1, 2, 2], [2, 1], [1, 40, 3], [0, 1], [1, 2.0, 3]])
def test_a_step_that_does_not_follow_is_named(tmp_path: Path, steps: list[float]) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(encode({"step": step, "loss": 1.0}) for step in steps))
    with pytest.raises(ValueError, match=r"m\.jsonl, line .*run\.resume=false"):
        read(path)


def test_a_run_goes_on_from_all_of_its_steps_alone(tmp_path: Path) -> None:
    """Kept copies of a finished run may lack some; to a run that resumes one is missing."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(encode({"step": step, "loss": 1.0}) for step in (1, 2, 4)))
    assert [record["step"] for record in read(path)] == [1, 2, 4]
    with pytest.raises(ValueError, match=r"m\.jsonl, line 3 .*run\.resume=false"):
        MetricsLog(path).truncate_after(4)
    assert MetricsLog(path).truncate_after(0) == []  # it starts over
    assert path.read_bytes() == b""


def test_truncate_keeps_bytes_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = fill(path, 5)
    head = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    assert [record["step"] for record in log.truncate_after(2)] == [1, 2]
    assert path.read_bytes() == head
    log.append({"step": 3, "loss": 1.0})
    assert [record["step"] for record in read(path)] == [1, 2, 3]
    assert log.truncate_after(0) == []
    assert path.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [path]  # no temporary file stays


def test_full_disk_keeps_the_lines_before(tmp_path: Path) -> None:
    log = fill(tmp_path / "m.jsonl", 3)
    before = log.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))  # room for half a line
    try:
        with pytest.raises(OSError, match="step 4"):
            log.append({"step": 4, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.path.read_bytes() == before
    log.append({"step": 4, "loss": 1.0})
    assert [record["step"] for record in read(log.path)] == [1, 2, 3, 4]


def test_tail_follows_a_growing_and_a_rewritten_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    log = fill(path, 2)
    assert [record["step"] for record in tail.new()] == [1, 2]
    with open(path, "ab") as file:
        file.write(b'{"step":3')
        file.flush()
        assert tail.new() == []  # half a line is no line yet
        file.write(b"}\n")
    assert [record["step"] for record in tail.new()] == [3]
    log.truncate_after(1)
    log.append({"step": 2, "loss": 0.0})
    assert [record["step"] for record in tail.new()] == [1, 2]
