"""README's speeds: which arms they are over, and which calls count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.experiments.scripts import loaded
from tests.study.report.fake_speeds import TWINS, Arm, rows, write_speeds
from zpp_lab.study.speed.results import Measured, read_speeds

script = loaded("experiments/speed/headline.py")
TWO_NODES = {(2, 2): ("12", "25", "max")}


def measured(folder: Path, arms: Sequence[Arm] = TWINS, slower: float = 1.0) -> list[Measured]:
    """Two calls of one table; in the later one the last arm is `slower`."""
    own = rows(arms, TWO_NODES)
    later = [row | {"call": "later"} for row in own]
    for row in (row for row in later if row["arm"] == arms[-1].name):
        row["tokens_per_s"] = str(float(row["tokens_per_s"]) / slower)
    return read_speeds(write_speeds(folder, own + later))


def test_leads_are_over_the_fastest_uncompressed_arm_of_each_call(tmp_path: Path) -> None:
    found = {(one.arm, one.link_gbps): one for one in script.leads(measured(tmp_path, slower=1.25))}
    assert {link for _, link in found} == {12, 25}  # named speeds alone
    lead = found["diff", 12]
    assert (lead.low, lead.high) == (pytest.approx(3.2, rel=1e-4), pytest.approx(4, rel=1e-4))
    assert (lead.calls, lead.text) == (2, "3.2–4.0")
    assert found["amsp_node", 12].text == "1"
    assert found["hsdp", 12].high == pytest.approx(2.4 / 3.5999, rel=1e-4)


@pytest.mark.parametrize("gone", ["hsdp", "amsp_node"])
def test_calls_without_hsdp_or_a_twin_are_refused(tmp_path: Path, gone: str) -> None:
    arms = [arm for arm in TWINS if arm.name != gone]
    with pytest.raises(ValueError, match=r"HSDP|twin"):
        script.leads(measured(tmp_path, arms))


def test_the_table_of_a_page_gets_the_numbers(tmp_path: Path) -> None:
    head = "| recipe | speed at 12 Gb/s | x |\n|---|---|---|\n"
    page = f"{head}| `diff`: words | ? | 1 |\n| `w8` | ? | 2 |\n"
    made = script.with_speeds(page, script.leads(measured(tmp_path)))
    assert made.splitlines()[2:] == ["| `diff`: words | 4.0 | 1 |", "| `w8` | not timed | 2 |"]
