"""The live table, read from folders that a fake trainer wrote."""

from __future__ import annotations

from pathlib import Path

from tests.study.fake_trainer import STEPS
from tests.study.run.test_launch import launch, study
from zpp_lab.files import held, hold
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
