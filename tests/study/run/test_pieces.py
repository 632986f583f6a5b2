"""A study in pieces: some arms at a time, for so long."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_trainer import fake_compose
from tests.study.fake_trainer import run as finish
from tests.study.run.test_launch import started, study
from zpp_lab.config.schema import Config
from zpp_lab.config.study import StudyConfig
from zpp_lab.study.run.attempts import StudyOutcome
from zpp_lab.study.run.launch import Launch, run_study
from zpp_lab.train.time_slice import PAUSED, UNFINISHED

ENTRY = "tests.study.run.test_pieces:run"


def run(config: Config) -> Any:
    """Arm `long` needs two starts; the others one."""
    folder = Path(str(config.run.dir))
    if config.run.arm == "long" and config.run.until is not None:
        with open(folder.parents[1] / "started.txt", "a") as file:
            file.write("long paused\n")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 1.0}) + "\n")
        return {"outcome": UNFINISHED, "step": 3}
    return finish(config)


def launch(
    what: StudyConfig,
    root: Path,
    *,
    arms: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    seconds: float | None = None,
) -> tuple[StudyOutcome, str]:
    out = io.StringIO()
    until = None if seconds is None else time.time() + seconds
    outcome = run_study(
        what,
        root,
        Launch(jobs=1, arms=arms, seeds=seeds, until=until),
        compose=fake_compose,
        entry=ENTRY,
        stream=out,
    )
    return outcome, out.getvalue()


def test_some_arms_alone(tmp_path: Path) -> None:
    what = study("zero3", "a", "b")
    outcome, _ = launch(what, tmp_path, arms=("b",))
    assert outcome.exit_code == 0
    assert started(tmp_path) == ["b 1", "b 2"]
    launch(what, tmp_path, arms=("zero3", "b"))
    assert started(tmp_path)[2:] == ["zero3 1", "zero3 2"]
    with pytest.raises(ValueError, match=r"'c'.*zero3, a, b"):
        launch(what, tmp_path, arms=("a", "c"))


def test_out_of_time_and_on_again(tmp_path: Path) -> None:
    what = study("zero3", "long", "z", seeds=1)
    outcome, text = launch(what, tmp_path, seconds=600)
    assert outcome.exit_code == PAUSED
    assert outcome.unfinished == ["long seed 1", "z seed 1"]
    assert "long seed 1: stopped after step 3 of 4" in text
    told = "Out of time:\n  long seed 1: stopped after step 3 of 4\n  1 not started\nThe same"
    assert told in text
    assert started(tmp_path) == ["zero3 1", "long paused"]  # z would have had no time
    assert not list(tmp_path.glob("*/*/failure.json"))
    assert not list(tmp_path.glob("*/*/attempts.jsonl"))
    outcome, _ = launch(what, tmp_path)
    assert outcome.exit_code == 0
    assert sorted(started(tmp_path)[2:]) == ["long 1", "z 1"]
