"""experiments/speed: predictions beside measured rows, and the ready machine's origin."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.experiments.scripts import loaded
from tests.study.report.fake_speeds import TWINS, rows, write_speeds
from zpp_lab.config.compose import compose
from zpp_lab.tools.bench.step.results import config_text
from zpp_lab.tools.plan.cost.machine import Machine, load_machine

HERE = Path(__file__).parents[2] / "experiments" / "speed"


def script(name: str) -> ModuleType:
    return loaded(f"experiments/speed/{name}.py")


def test_the_measured_table_is_met_where_links_bound_the_step(tmp_path: Path) -> None:
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    assert check_cost.check([HERE / "results.csv"], load_machine("h200"), [], out) == 0
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 53
    # the host waits for the link a fifth of the step or more; at 50 Gb/s on 2 x 1 raw twins do not
    # reach what their bytes allow, and predictions are up to 23 % too fast
    links = [
        r
        for r in rows
        if r["link_gbps"] in ("12", "25")
        if float(r["waiting_s"] or "inf") > 0.2 * float(r["step_s"])
    ]
    assert len(links) == 24
    assert max(abs(float(r["error"])) for r in links) < 0.035


@pytest.mark.parametrize(("call", "count", "most"), [("19", 3, 0.04), ("31", 15, 0.045)])
def test_steps_of_cuda_graphs_are_met(tmp_path: Path, call: str, count: int, most: float) -> None:
    """Inside a host and between nodes; the eager steps of a slower host are not."""
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    table = HERE / "calls" / call / "results.csv"
    assert check_cost.check([table], load_machine("h200"), [], out) == 0
    rows = list(csv.DictReader(out.open()))
    replayed = [r for r in rows if r["arm"] not in ("fsdp2", "zeropp_eager")]
    assert len(replayed) == count
    assert max(abs(float(r["error"])) for r in replayed) < most


def test_leads_over_the_twin_by_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured on the table's shape; elsewhere predicted, by bytes where the link is the bound."""
    check_cost, machine = script("check_cost"), load_machine("h200")
    words = ["model=125m", "engine=fsdp", "train.param_dtype=bf16", "train.reduce_dtype=bf16"]
    same = json.loads(config_text(compose(words)))
    arms = [replace(arm, config={**same, **arm.config}) for arm in TWINS]
    table = write_speeds(tmp_path, rows(arms, {(2, 2): ("1", "max")}))
    assert check_cost.shapes(table, machine) == 0
    _, _, line = capsys.readouterr().out.splitlines()
    name, link, shape, measured, *predicted = line.strip("| ").split(" | ")
    assert (name, link, shape, float(measured)) == ("diff over amsp_node", "1", "2 × 2", 4.0)
    assert len(predicted) == len(check_cost.SHAPES)
    assert all(3 < float(lead) < 4 for lead in predicted)  # 16 bits over 4 and scales
    assert check_cost.shapes(write_speeds(tmp_path), machine) == 1


def test_the_ready_machine_is_what_the_kept_figures_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = script("machine")
    saved: list[Machine] = []
    monkeypatch.setattr(Machine, "save", lambda machine, path: saved.append(machine))
    made.main()
    assert saved == [load_machine("h200")]
