from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.study.report.fake_speeds import TWINS, rows, write_speeds
from zpp_lab.study.speed.results import BASE, Measured, Setting, read_speeds
from zpp_lab.study.speed.speeds import (
    BreakEven,
    break_evens,
    speed_ups,
    strongest_plain,
    without_base,
    without_hsdp,
    without_twin,
)

SETTING = Setting("m", 2, 2, 64, 1, 256)


def point(arm: str, link: str, rate: float, measured_gbps: float | None = None) -> Measured:
    names = ("step_s", "step_min_s", "step_max_s", "floor_s", "share_of_floor", "peak_gib")
    nothing = dict.fromkeys((*names, "waiting_s"), None)
    return Measured(
        SETTING, arm, "", "", link, rate, **nothing, measured_gbps=measured_gbps, machine="",
        config=None,
    )  # fmt: skip


def curve(values: dict[float, float]) -> BreakEven:
    """Of an arm `a` with these speed-ups by Gb/s."""
    points = [point(BASE, f"{g:g}", 100) for g in values]
    points += [point("a", f"{g:g}", 100 * v) for g, v in values.items()]
    (found,) = break_evens(speed_ups(points))
    return found


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({10: 2, 100: 1.5}, "always faster in the measured range"),
        ({10: 0.9, 100: 0.5}, "never faster in the measured range"),
        ({10: 0.5, 1000: 2}, "faster above 100 Gb/s"),
        ({10: 2, 1000: 0.5, 100000: 2}, "faster below 100 Gb/s and above 10,000 Gb/s"),
        ({10: 0.5, 1000: 2, 100000: 0.5}, "faster from 100 to 10,000 Gb/s"),
        ({10: 2, 100: 1}, "faster below 100 Gb/s"),
        ({10: 2}, "faster at the only speed measured"),
        ({10: 1}, "not faster at the only speed measured"),
    ],
)
def test_break_evens_in_words(values: dict[float, float], text: str) -> None:
    assert curve(values).text == text


@given(st.floats(1, 100), st.floats(1.01, 100), st.floats(0.05, 20), st.floats(0.05, 20))
def test_a_crossing_lies_between_its_links(x: float, step: float, y0: float, y1: float) -> None:
    ends = [float(f"{g:g}") for g in (x, x * step)]
    assume(len(set(ends)) == 2)
    found = curve(dict(zip(ends, (y0, y1), strict=True)))
    assert len(found.crossings) == ((y0 > 1) != (y1 > 1))
    assert all(min(ends) * 0.999 <= c <= max(ends) * 1.001 for c in found.crossings)


def test_speed_ups_have_the_spread_of_their_steps(tmp_path: Path) -> None:
    measured = read_speeds(write_speeds(tmp_path))
    found = {(one.at.arm, one.at.link): one for one in speed_ups(measured)}
    one = found["zeropp", "25"]
    assert one.value == pytest.approx(4.0, rel=1e-4)
    assert (one.low, one.high) == (pytest.approx(4 / 1.02), pytest.approx(4 / 0.98))
    by_arm = {b.arm: b for b in break_evens(speed_ups(measured))}
    assert set(by_arm) == {"zeropp", "w4_g84h"}
    assert by_arm["zeropp"].text.startswith("faster below 3")  # truly 270, between 50 and 400
    assert (by_arm["zeropp"].slowest, by_arm["zeropp"].fastest) == (12, 2000)


def test_only_like_is_compared_with_like(tmp_path: Path) -> None:
    table = rows() + [row | {"model": "13b"} for row in rows() if row["engine"] != "fsdp2"]
    measured = read_speeds(write_speeds(tmp_path, table))
    assert {one.at.setting.model for one in speed_ups(measured)} == {"1_3b"}
    assert [s.text for s in without_base(measured)] == ["13b, 2 × 2", "13b, 1 × 4"]


def test_an_unlimited_link_lies_where_it_was_measured() -> None:
    base, known = point(BASE, "max", 50, 63.0), point("a", "max", 100, 63.0)
    unknown = point("a", "max", 100)
    assert [one.at.gbps for one in speed_ups([base, known, unknown])] == [63.0, 63.0, None]
    assert break_evens(speed_ups([point(BASE, "max", 50), unknown])) == []


def test_speeds_are_compared_with_the_strongest_plain_arm_of_their_call(tmp_path: Path) -> None:
    """The fastest of FSDP2's ways at each link, also where another call was faster."""
    own = rows(TWINS)
    other = [row | {"call": "later", "tokens_per_s": "1e9"} for row in own]
    measured = read_speeds(write_speeds(tmp_path, own + other))
    bases = strongest_plain(measured)
    assert {cell[1]: m.arm for cell, m in bases.items() if not cell[2]} == {
        "12": "hsdp", "25": "hsdp", "50": "hsdp", "400": "fsdp2", "max": "fsdp2",
    }  # fmt: skip
    found = {(u.at.arm, u.at.link, u.at.call): u for u in speed_ups(measured)}
    assert found["diff", "12", ""].value == pytest.approx(2.4 / 0.4, rel=1e-4)
    assert found["diff", "12", "later"].value == 1


def test_bits_and_partition_multiply_to_the_speed_up(tmp_path: Path) -> None:
    measured = read_speeds(write_speeds(tmp_path, rows(TWINS)))
    ups = {(u.at.arm, u.at.link): u for u in speed_ups(measured)}
    one = ups["diff", "12"]
    assert one.bits == pytest.approx(1.6 / 0.4, rel=1e-4)
    assert one.partition == pytest.approx(2.4 / 1.6, rel=1e-4)
    assert all(u.bits * u.partition == pytest.approx(u.value) for u in ups.values() if u.bits)
    assert {arm for (arm, _), u in ups.items() if u.bits is None} == {
        "fsdp2", "fsdp2+node", "hsdp", "amsp_node",
    }  # fmt: skip
    assert (without_twin(measured), without_hsdp(measured)) == ({}, [])


@pytest.mark.parametrize("link", ["12", "max"])
def test_a_table_that_lacks_a_named_twin_is_refused(tmp_path: Path, link: str) -> None:
    gone = ("amsp_node", link)
    table = [row for row in rows(TWINS) if (row["arm"], row["link_gbps"]) != gone]
    with pytest.raises(ValueError, match="amsp_node for diff"):
        speed_ups(read_speeds(write_speeds(tmp_path, table)))


def test_older_tables_are_marked_as_without_twin(tmp_path: Path) -> None:
    older = [{k: v for k, v in row.items() if k not in ("twin", "call")} for row in rows(TWINS)]
    measured = read_speeds(write_speeds(tmp_path, older))
    assert {arm for arms in without_twin(measured).values() for arm in arms} == {"diff"}
    assert all(up.bits is None for up in speed_ups(measured))
    plain = [m for m in measured if m.arm != "hsdp"]
    assert {setting.nodes for setting in without_hsdp(plain)} == {2}  # inside a host it is fsdp2
