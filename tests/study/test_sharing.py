"""What runs cost that share GPUs: GPU time adds up, and finished runs count as they ran."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.study.fake_trainer import STEPS, fake_compose
from tests.study.test_dry_run import FORESEEN
from tests.study.test_launch import ENTRY, study
from zpp_lab.config import Config
from zpp_lab.study import calibration, cost, dry_run
from zpp_lab.study.calibration import Cost
from zpp_lab.study.cost import Estimate, Forecast
from zpp_lab.study.launch import run_study
from zpp_lab.study.plan import PlannedRun
from zpp_lab.study.sharing import ADDED, AS_THEY_RAN, has_shared, note

REAL = ["engine.name=fsdp", "cluster.nodes=2", "cluster.gpus_per_node=2"]


def on_gpus(overrides: list[str]) -> Config:
    return fake_compose([*overrides, "engine.device=auto"])


def runs(count: int, one: Cost, *overrides: str) -> list[Forecast]:
    """Of STEPS steps each."""
    config = on_gpus(list(overrides))
    planned = PlannedRun("a", 1, Path("none"), config)
    return [Forecast(planned, "unfinished", 0, FORESEEN, one)] * count


def test_gpu_time_of_runs_that_share_adds_up() -> None:
    ten = Cost(10.0 / STEPS, 0.0)
    alone = Estimate(runs(8, ten), 2, gpus=2)
    shared = Estimate(runs(8, ten), 6, gpus=2)
    assert alone.seconds == shared.seconds == pytest.approx(40.0)
    assert not alone.added
    assert shared.added
    assert not shared.as_they_ran
    assert Estimate(runs(8, ten), 6).seconds == pytest.approx(80 / 6)  # cores, with threads each
    assert Estimate(runs(1, ten), 6, gpus=2).seconds == pytest.approx(10.0)
    assert Estimate(runs(8, ten), 1, gpus=4).seconds == pytest.approx(80.0)  # --jobs 1


def test_runs_of_several_ranks_add_up_over_all_their_gpus() -> None:
    ten = Cost(10.0 / STEPS, 0.0)
    assert Estimate(runs(6, ten, *REAL), 3, gpus=4).seconds == pytest.approx(60.0)
    assert Estimate(runs(6, ten, *REAL), 2, gpus=8).seconds == pytest.approx(30.0)


def test_times_of_runs_that_shared_count_as_they_ran() -> None:
    both = Estimate(runs(8, Cost(10.0 / STEPS, 0.0, shared=True)), 4, gpus=2)
    assert both.seconds == pytest.approx(20.0)
    assert (both.added, both.as_they_ran) == (False, True)


def test_on_another_machine_those_side_by_side_share_as_the_study_says() -> None:
    ten = Cost(10.0 / STEPS, 0.0)
    assert Estimate(runs(8, ten), 4, per_gpu=2).seconds == pytest.approx(40.0)
    assert Estimate(runs(8, ten), 1, per_gpu=2).seconds == pytest.approx(80.0)


def test_a_run_that_ends_on_a_whole_gpu_has_not_shared(tmp_path: Path) -> None:
    note(tmp_path, 0.5)
    assert has_shared(tmp_path)
    note(tmp_path, 1.0)
    assert not has_shared(tmp_path)


def forecast(root: Path, per_gpu: int) -> tuple[Estimate, str]:
    out = io.StringIO()
    found = dry_run.dry_run(
        replace(study("zero3", "a"), runs_per_gpu=per_gpu), root, 0,
        compose=on_gpus, entry=ENTRY, console=Console(file=out, width=140),
    )  # fmt: skip
    return found, out.getvalue()


def test_a_study_says_what_it_takes_shared_gpus_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(calibration, "tokens_are_ready", lambda config: True)
    monkeypatch.setattr(cost, "foresee", lambda config: FORESEEN)
    found, text = forecast(tmp_path, 2)
    assert found.side_by_side == 2
    assert found.seconds == pytest.approx(4 * 0.1 * STEPS)
    assert ADDED in text
    _, text = forecast(tmp_path, 1)
    assert ADDED not in text

    (tmp_path / "two").mkdir()
    seed = replace(study("zero3", seeds=1), runs_per_gpu=2)
    run_study(seed, tmp_path / "two", compose=on_gpus, entry=ENTRY, stream=io.StringIO())
    assert has_shared(tmp_path / "two" / "zero3" / "seed1")
    found, text = forecast(tmp_path / "two", 2)
    assert found.as_they_ran
    assert AS_THEY_RAN in text
    assert ADDED not in text


def test_a_time_of_a_gpu_alone_counts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seed = replace(study("zero3"), runs_per_gpu=2)
    run_study(seed, tmp_path, compose=on_gpus, entry=ENTRY, stream=io.StringIO())
    planned = [PlannedRun("zero3", n, tmp_path / "zero3" / f"seed{n}", on_gpus([])) for n in (1, 2)]
    (both,) = cost.known(tmp_path, planned, 60.0).values()
    note(planned[0].dir, 1.0)
    (first,) = cost.known(tmp_path, planned, 60.0).values()
    assert isinstance(both, Cost)
    assert isinstance(first, Cost)
    assert (both.shared, first.shared) == (True, False)
