"""The size from which on kernels read peers' rows in place: only where it was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.cost.machine import load_machine
from zpp_lab.crossover import Crossover, measured_here
from zpp_lab.paths import conf_dir


def machine(folder: Path, name: str, gpu: str, *pull: dict[str, Any]) -> Path:
    told = json.loads((conf_dir() / "machine" / "h200.json").read_text())
    told["gpu"], told["intra"]["pull"] = gpu, list(pull)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(told))
    return path


def test_a_gpus_figures_are_found_by_its_name(tmp_path: Path) -> None:
    machine(tmp_path, "b", "X", {"ranks": 2, "gather": 5.0}, {"ranks": 4, "exchange": 7.0})
    machine(tmp_path, "a", "Y", {"ranks": 2, "gather": 1.0})
    machine(tmp_path, "c", "X", {"ranks": 2, "gather": 9.0})  # the first file counts
    machine(tmp_path, "d", "", {"ranks": 2, "gather": 9.0})
    wanted = {2: Crossover(2, gather=5.0), 4: Crossover(4, exchange=7.0)}
    assert measured_here("X", tmp_path) == wanted
    assert measured_here("Z", tmp_path) == {}
    assert measured_here("", tmp_path) == {}


def test_what_the_files_of_conf_say() -> None:
    assert measured_here("no such GPU") == {}
    assert measured_here("NVIDIA H200") == {2: Crossover(2)}
    assert load_machine("h200").intra.pull == (Crossover(2),)  # measured: copies always


def test_it_survives_the_machines_file(tmp_path: Path) -> None:
    path = machine(tmp_path, "a", "X", {"ranks": 2, "gather": None, "exchange": 7.0})
    loaded = load_machine(str(path))
    assert loaded.intra.pull == (Crossover(2, None, 7.0),)
    loaded.save(path)
    assert load_machine(str(path)) == loaded
    assert measured_here("X", tmp_path) == {2: Crossover(2, None, 7.0)}


@pytest.mark.parametrize(
    ("entry", "problem"),
    [({"ranks": 1}, "use 2 or more"), ({"ranks": 2, "gather": -1}, "0 or more"), ({}, "ranks")],
)
def test_wrong_figures_name_the_file(entry: dict[str, Any], problem: str, tmp_path: Path) -> None:
    machine(tmp_path, "a", "X", entry)
    with pytest.raises(ValueError, match=rf"a\.json: .*{problem}"):
        measured_here("X", tmp_path)
