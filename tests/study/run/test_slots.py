"""Where runs go: GPUs whole, shared and many at once, or shares of the cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.study.fake_trainer import fake_compose
from zpp_lab.config.schema import Config
from zpp_lab.runs.reader import Run
from zpp_lab.study.run import attempts
from zpp_lab.study.run.places import Memory, Need, Places, make_places
from zpp_lab.study.run.plan import PlannedRun
from zpp_lab.train.launch.mps import PROGRAM

GIB = 2**30


def config(*overrides: str) -> Config:
    return fake_compose(["engine.device=auto", *overrides])


def planned(folder: Path, *overrides: str) -> PlannedRun:
    return PlannedRun("a", 1, folder, config(*overrides))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("zpp_lab.study.run.places.cores", lambda: 16)


@pytest.mark.usefixtures("machine")
def test_small_runs_take_a_gpu_each_and_a_big_one_waits_for_its_four() -> None:
    places = make_places(0, 1, [config()])
    first, second = places.take(Need()), places.take(Need())
    assert first is not None
    assert second is not None
    assert {first.gpus, second.gpus} == {"4", "5"}
    assert first.threads == 4
    assert places.take(Need(4)) is None
    places.give(first)
    places.give(second)
    big = places.take(Need(4))
    assert big is not None
    assert big.gpus == "4,5,6,7"
    assert places.take(Need()) is None


@pytest.mark.usefixtures("machine")
def test_runs_share_gpus_evenly_and_jobs_caps_them() -> None:
    places = make_places(0, 2, [config()])
    given = [places.take(Need(1, 0.5)) for _ in range(9)]
    assert [s.gpus for s in given[:8] if s] == ["4", "5", "6", "7"] * 2
    assert given[8] is None
    assert places.shared(given[0])  # type: ignore[arg-type]
    places = make_places(3, 2, [config()])
    assert [places.take(Need(1, 0.5)) is not None for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.usefixtures("machine")
def test_a_run_that_can_never_fit_is_an_error_before_the_study() -> None:
    big = config("engine.name=fsdp", "cluster.nodes=1", "cluster.gpus_per_node=8")
    with pytest.raises(ValueError, match=r"8 GPUs.*\b4\b.*engine=virtual"):
        make_places(0, 1, [config(), big])


def test_without_gpus_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zpp_lab.study.run.places.cores", lambda: 6)
    places = make_places(2, 1, [config("engine.device=cpu")])
    ranks = places.take(Need(8))  # processes of their own; they take all there is
    assert ranks is not None
    assert (ranks.threads, ranks.gpus) == (3, None)
    assert places.take(Need()) is None
    with pytest.raises(ValueError, match="use 0"):
        make_places(-1, 1, [config()])


def test_measured_memory_says_how_many_share_a_gpu(tmp_path: Path) -> None:
    run, other = planned(tmp_path), planned(tmp_path, "model.dim=64")
    memory = Memory(0, total=100 * GIB)
    assert memory.need(run) == Need(1, 1.0)  # the first of its shape is alone
    summary = {"peak_memory_bytes": 20 * GIB, "heldout_loss": 1.0}
    memory.learn(run, Run(tmp_path, "a", 1, {}, summary))
    assert memory.need(run) == Need(1, pytest.approx(0.24))
    assert memory.need(other) == Need(1, 1.0)
    places = Places(["0"], jobs=16, threads=1)
    assert sum(places.take(memory.need(run)) is not None for _ in range(8)) == 4
    assert Memory(3, total=GIB).need(run) == Need(1, 1 / 3)


def test_runs_of_several_ranks_share_gpus_under_mps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = planned(tmp_path, "engine.name=fsdp", "cluster.nodes=2", "cluster.gpus_per_node=2")
    assert Memory(3).need(ranks) == Need(4)
    monkeypatch.setenv(PROGRAM, "nvidia-cuda-mps-control")
    assert Memory(3).need(ranks) == Need(4, 1 / 3)
    places = Places(["0", "1", "2", "3"], jobs=9, threads=1)
    assert [places.take(Need(4, 1 / 3)) is not None for _ in range(4)] == [True] * 3 + [False]


def test_a_line_that_was_cut_costs_no_other_one(tmp_path: Path) -> None:
    crash = {"outcome": "crashed", "error": "} it broke", "step": 3}
    attempts.note(tmp_path, crash)
    file = tmp_path / attempts.FILE
    for cut in (10, len('{"outcome":"crashed","error":"}')):  # a kill, or a disk that was full
        whole = file.read_text()
        file.write_text(whole + whole.splitlines()[0][:cut])
        attempts.note(tmp_path, crash)
    assert attempts.attempts(tmp_path) == [crash] * 3
