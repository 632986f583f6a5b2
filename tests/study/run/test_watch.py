"""The live table, read from folders that a fake trainer wrote."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.study.fake_trainer import STEPS
from tests.study.run.test_launch import launch, study
from zpp_lab.config.schema import Config
from zpp_lab.files import held, hold
from zpp_lab.study.run import progress
from zpp_lab.study.run.plan import PlannedRun
from zpp_lab.study.run.progress import RunState, Watch


def test_states_of_runs(tmp_path: Path) -> None:
    launch(study("zero3", "raises", "diverges"), tmp_path)
    states = {(s.arm, s.seed): s.state for s in Watch(tmp_path).look()}
    assert states["zero3", 1] == "finished"
    assert states["raises", 2] == "crashed"
    assert states["diverges", 1] == "diverged"
    for name in ("summary.json", "attempts.jsonl"):
        (tmp_path / "zero3" / "seed1" / name).unlink(missing_ok=True)
    watch = Watch(tmp_path)
    assert watch.look()[0].state == "stopped"
    with hold(tmp_path / "zero3" / "seed1"):
        assert watch.look()[0] == RunState("zero3", 1, "running", STEPS, STEPS, 0.4)
    assert not held(tmp_path / "zero3" / "seed1")
    assert not watch.running


def test_without_a_terminal_a_long_run_is_told_of_each_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out, now = PlannedRun("zero3", 1, tmp_path, Config()), io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = progress.Progress(2, [run], out)
    for now[0] in (0.0, 30.0, 61.0, 90.0):
        told.update([run])
    assert out.getvalue() == f"1/2 runs, ? left: zero3 seed 1 0/{run.config.train.steps}\n"
