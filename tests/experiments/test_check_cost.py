"""experiments/speed: predictions beside measured rows, and the ready machine's origin."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.experiments.scripts import loaded
from zpp_lab.config.load import load
from zpp_lab.tools.plan.cost.machine import Machine, load_machine

HERE = Path(__file__).parents[2] / "experiments" / "speed"


def script(name: str) -> ModuleType:
    return loaded(f"experiments/speed/{name}.py")


def test_the_measured_table_is_met_where_links_bound_the_step(tmp_path: Path) -> None:
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    assert check_cost.check([HERE / "results.csv"], load_machine("h200"), [], out) == 0
    rows = list(csv.DictReader(out.open()))
    errors = sorted(abs(float(row["error"])) for row in rows)
    assert len(rows) == 33
    assert errors[16] < 0.035
    named = [r for r in rows if r["nodes"] == "2" and r["link_gbps"] != "max"]
    assert [abs(float(r["error"])) < 0.036 for r in named].count(True) == 19
    assert len(named) == 21


def test_rows_without_a_plan_of_ours_are_left_out_and_said(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("engine,recipe\ndeepspeed,zeropp\n")
    assert script("check_cost").check([path], load_machine("h200"), [], None) == 1
    assert "left out: deepspeed zeropp: no plan of ours (1)" in capsys.readouterr().out


def test_a_row_that_says_its_config_is_taken_at_its_word() -> None:
    check_cost = script("check_cost")
    own = {"model.layers": 3, "recipe.weights.bits": 4, "train.param_dtype": "bf16"}
    row = {"engine": "fsdp", "recipe": "w4", "config": json.dumps(own)}
    config = check_cost.config_of(row, [])
    assert (config.model.layers, config.recipe.weights.bits) == (3, 4)
    assert config.model.vocab_size == 32000


@pytest.mark.parametrize(
    ("nodes", "link", "measured", "taken"),
    [("2", "25", "24.1", 25.0), ("2", "max", "61", 61.0), ("2", "max", "", None),
     ("1", "max", "61", None)],
)  # fmt: skip
def test_a_link_without_a_limit_is_as_fast_as_it_was_found(
    nodes: str, link: str, measured: str, taken: float | None
) -> None:
    row = {"nodes": nodes, "link_gbps": link, "measured_gbps": measured}
    assert script("check_cost").bandwidth(row) == taken


def test_the_ready_machine_is_what_the_kept_figures_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = script("machine")
    saved: list[Machine] = []
    monkeypatch.setattr(Machine, "save", lambda machine, path: saved.append(machine))
    made.main()
    assert saved == [load_machine("h200")]


def test_the_published_machine_is_whole() -> None:
    assert load(Machine, json.loads((HERE / "v100.json").read_text())).name == "v100-published"
