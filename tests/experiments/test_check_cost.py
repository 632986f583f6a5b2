"""experiments/speed: predictions beside measured rows, and the ready machine's origin."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.experiments.scripts import loaded
from zpp_lab.config_load import load
from zpp_lab.cost.machine import Machine, load_machine

HERE = Path(__file__).parents[2] / "experiments" / "speed"


def script(name: str) -> ModuleType:
    return loaded(f"experiments/speed/{name}.py")


def test_measured_rows_are_met_without_a_factor_for_each(tmp_path: Path, capsys) -> None:
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    assert check_cost.check([HERE / "rows.csv"], load_machine("h200"), [], out) == 0
    rows = list(csv.DictReader(out.open()))
    errors = sorted(abs(float(row["error"])) for row in rows)
    assert len(rows) == 14
    assert errors[len(rows) // 2] < 0.1
    assert "median error" in capsys.readouterr().out


def test_the_measured_table_is_met_where_links_bound_the_step(tmp_path: Path) -> None:
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    assert check_cost.check([HERE / "results.csv"], load_machine("h200"), [], out) == 0
    rows = list(csv.DictReader(out.open()))
    errors = sorted(abs(float(row["error"])) for row in rows)
    assert len(rows) == 33
    assert round(errors[16], 3) == 0.034
    named = [r for r in rows if r["nodes"] == "2" and r["link_gbps"] != "max"]
    assert [abs(float(r["error"])) < 0.036 for r in named].count(True) == 19
    assert len(named) == 21


def test_rows_bound_by_the_host_are_counted_by_themselves(tmp_path: Path, capsys) -> None:
    check_cost, out = script("check_cost"), tmp_path / "check.csv"
    check_cost.check([HERE / "results.csv"], load_machine("h200"), [], out)
    rows = [r for r in csv.DictReader(out.open()) if check_cost.host_bound(r)]
    assert {(r["model"], r["link_gbps"]) for r in rows} == {("1_3b", "50"), ("1_3b", "max")}
    errors = sorted(float(r["error"]) for r in rows)
    (told,) = [t for t in capsys.readouterr().out.splitlines() if "bound by the host" in t]
    assert f"{len(rows)} rows: median error {(errors[3] + errors[4]) / 2:.1%}" in told
    assert "figures of h200 lack host.block_again_s and host.block_rest_s" in told
    assert not check_cost.host_bound({"step_s": "1", "waiting_s": ""})
    assert not check_cost.host_bound({"step_s": "1"})


def test_the_newest_figures_of_the_host_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = HERE / "calls" / "8" / "machine.json"
    words = ["check_cost.py", "check", str(HERE / "results.csv"), "--machine", str(machine)]
    told = []
    for more in ([], ["--host-as-before", "8"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        assert script("check_cost").main() == 0
        (line,) = (t for t in capsys.readouterr().out.splitlines() if "bound by the host" in t)
        told.append(line)
    assert "8 rows: median error 12.0%, most 21.1%, mean +12.7%" in told[0]
    assert "lack" not in told[0]
    assert "8 rows: median error 24.1%, most 31.3%, mean +24.3%" in told[1]
    assert "lack host.block_again_s and host.block_rest_s" in told[1]


def test_the_arms_of_the_page_are_what_the_model_says(tmp_path: Path) -> None:
    out = tmp_path / "predicted.csv"
    assert script("check_cost").arms(load_machine("h200"), out) == 0
    assert out.read_text() == (HERE / "predicted.csv").read_text()


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
