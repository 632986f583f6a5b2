"""The tracker: what stops a run, and what never does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.config.schema import Config, RunConfig, TrackingConfig, TrainConfig
from zpp_lab.runs import tracker
from zpp_lab.runs.metrics import read
from zpp_lab.runs.tracker import Tracker


def config(study: str | None = None, **tracking: Any) -> Config:
    return Config(
        train=TrainConfig(steps=20),
        tracking=TrackingConfig(**{"wandb": "off", **tracking}),
        run=RunConfig(study=study),
    )


def record(step: int) -> dict[str, Any]:
    hops = {"intra": 10, "inter": 3}
    return {
        "step": step,
        "loss": 4.0 / step,
        "tokens": step * 256,
        "seconds": step * 0.1,
        "bytes": {"weights_forward": hops, "grads_inter": {"intra": 0, "inter": 7}},
    }


def test_what_is_being_written_is_let_be(tmp_path: Path) -> None:
    """By a sender of the run's, for instance; what a killed process has left goes."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for pid in (gone.pid, os.getppid()):
        (tmp_path / f".wandb.json.{pid}.tmp").write_text("{")
    Tracker(config(), tmp_path, 0)
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [f".wandb.json.{os.getppid()}.tmp"]


def test_a_checkpoint_without_its_metrics_is_an_error(tmp_path: Path) -> None:
    Tracker(config(), tmp_path, 0).log(record(1))
    with pytest.raises(ValueError, match=r"step 1\b.* step 4.*run\.resume=false"):
        Tracker(config(), tmp_path, 4)


def test_a_failing_view_is_named_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(tracker.Progress, "update", refuse)
    monkeypatch.setattr(tracker, "start_run_sink", refuse)
    one = Tracker(config(wandb="offline"), tmp_path, 0)
    for step in range(1, 5):
        one.log(record(step))
    one.finish({"outcome": "finished"})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["wandb", "console"]
    assert len(read(tmp_path / "metrics.jsonl")) == 4


def test_a_console_log_that_cannot_be_opened_is_said_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "console.log").mkdir()
    one = Tracker(config(), tmp_path, 0)
    one.log(record(1))
    one.finish({"outcome": "finished"})
    assert capsys.readouterr().err.count("console.log is") == 1
    assert (tmp_path / "summary.json").exists()


def test_fail_never_hides_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Tracker(config(), tmp_path, 0)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker.files, "write_atomic", refuse)
    one.fail({"outcome": "crashed"})
    assert "failure.json: [Errno 28]" in capsys.readouterr().err
    one.fail({"outcome": "crashed"}, full=True)  # which the failure says itself
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("study", "wandb"), [(None, "off"), ("smoke", "offline")])
def test_no_process_when_off_or_in_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: str | None, wandb: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    one = Tracker(config(study, wandb=wandb), tmp_path, 0)
    one.log(record(1))
    one.finish({"outcome": "finished"})
    assert not (tmp_path / "wandb.json").exists()
