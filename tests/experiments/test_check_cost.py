"""experiments/speed: predictions beside measured rows, and the ready machine's origin."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType

import pytest

from tests.experiments.scripts import loaded
from zpp_lab.tools.plan.cost.machine import Machine, load_machine

HERE = Path(__file__).parents[2] / "experiments" / "speed"


def script(name: str) -> ModuleType:
    return loaded(f"experiments/speed/{name}.py")


def test_the_measured_table_is_met_where_links_bound_the_step(tmp_path: Path) -> None:
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    assert check_cost.check([HERE / "results.csv"], load_machine("h200"), [], out) == 0
    rows = list(csv.DictReader(out.open()))
    errors = sorted(abs(float(row["error"])) for row in rows)
    assert len(rows) == 49
    assert round(errors[24], 3) <= 0.087
    named = [r for r in rows if r["nodes"] == "2" and r["link_gbps"] != "max"]
    assert [round(abs(float(r["error"])), 3) <= 0.04 for r in named].count(True) == 23
    assert len(named) == 33


def test_the_ready_machine_is_what_the_kept_figures_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = script("machine")
    saved: list[Machine] = []
    monkeypatch.setattr(Machine, "save", lambda machine, path: saved.append(machine))
    made.main()
    assert saved == [load_machine("h200")]
