"""`zpp-lab bench step` on GPUs that nodes share: what rows and files say of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.bench.test_step import TINY, Fake, fake, read_rows
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.bench.step import run
from zpp_lab.tools.bench.step.arms import arms, with_compute
from zpp_lab.tools.bench.step.run import Pace, StepBench
from zpp_lab.tools.links.nodes import OneHost
from zpp_lab.train.launch.gpus import Placement, place

__all__ = ["fake"]  # a fixture


class TwoNodes(OneHost):
    """Two nodes by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = 2


def shared(folder: Path, placement: Placement) -> StepBench:
    pace = Pace(steps=3, rounds=1, turn_seconds=8, limit=9, budget=99)
    every = with_compute(arms(["fsdp2", "zeropp"], [*TINY, "cluster=2x2"]))
    made = StepBench(TwoNodes(), placement, every, pace, folder)
    made.run([None])
    return made


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"gpus": ["NVIDIA H200"] * 2, "cores": 8}
    monkeypatch.setattr(run, "machine_facts", lambda: facts)


@pytest.mark.usefixtures("gpus")
def test_rows_and_files_say_that_ranks_shared(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)
    shared(tmp_path, place(cluster, ["0", "1"], "mps"))
    row = read_rows(tmp_path)["zeropp"]
    assert row["ranks_per_gpu"] == "2"
    assert row["machine"] == "one host of 2 × NVIDIA H200, 2 ranks a GPU through MPS"
    assert float(row["compute_s"]) == 0.4  # the floor is the shared machine's own
    facts = json.loads((tmp_path / "2x2-shared.json").read_text())["gpus"]
    assert facts == {"of_nodes": [["0", "1"]] * 2, "ranks_per_gpu": 2, "share": "mps"}
    assert "2x2 on 2 GPUs" in capsys.readouterr().out
    shared(tmp_path, place(cluster, ["0", "1"], "time-slices"))
    assert read_rows(tmp_path)["zeropp"]["machine"].endswith("2 ranks a GPU in time slices")


@pytest.mark.usefixtures("gpus")
def test_cells_on_whole_gpus_stay_beside_shared_ones(fake: type[Fake], tmp_path: Path) -> None:
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)
    for visible in (["0", "1"], ["0", "1", "2", "3"], ["0", "1"]):
        shared(tmp_path, place(cluster, visible, "mps"))
    with (tmp_path / "results.csv").open() as file:
        found = [(row["arm"], row["ranks_per_gpu"]) for row in csv.DictReader(file)]
    assert sorted(found) == [(a, n) for a in ("compute", "fsdp2", "zeropp") for n in "12"]
    assert {p.name for p in tmp_path.glob("*.json")} == {"2x2.json", "2x2-shared.json"}
