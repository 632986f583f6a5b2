"""Studies whose arms start from a run that is made first."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.study.fake_trainer import fake_compose
from zpp_lab.config.study import ArmConfig, PrepareConfig, StudyConfig
from zpp_lab.runs.reader import find_runs, read_study
from zpp_lab.study.run.attempts import StudyOutcome
from zpp_lab.study.run.launch import Launch, run_study
from zpp_lab.study.run.plan import Planner

ENTRY = "tests.study.fake_trainer:run"


def study(
    *first: PrepareConfig, starts: tuple[str | None, str | None] = (None, None)
) -> StudyConfig:
    names = ("zero3", "a")
    return StudyConfig(
        name="test",
        question="Does it hold?",
        arms=[
            ArmConfig(name, [f"recipe.exempt.below_numel={i}"], start=start)
            for i, (name, start) in enumerate(zip(names, starts, strict=True))
        ],
        seeds=[1, 2],
        overrides=["train.steps=3"],
        prepare=list(first),
    )


def launch(what: StudyConfig, root: Path) -> tuple[StudyOutcome, str]:
    out = io.StringIO()
    outcome = run_study(what, root, Launch(jobs=1), compose=fake_compose, entry=ENTRY, stream=out)
    return outcome, out.getvalue()


def started(root: Path) -> list[str]:
    return (root / "started.txt").read_text().splitlines()


def test_it_runs_once_before_the_arms(tmp_path: Path) -> None:
    what = study(PrepareConfig("base", ["train.steps=5"], seed=7))
    outcome, text = launch(what, tmp_path)
    assert started(tmp_path) == ["base 7", "zero3 1", "zero3 2", "a 1", "a 2"]
    assert "[1/5] prepare base: held-out loss" in text
    assert (len(outcome.finished), outcome.exit_code) == (5, 0)
    assert read_study(tmp_path) == what
    assert {run.arm for run in find_runs(tmp_path)} == {"zero3", "a"}, "it is no run of an arm"
    again, _ = launch(what, tmp_path)
    assert len(again.skipped) == 5
    assert len(started(tmp_path)) == 5


def test_arms_start_from_the_one_they_name(tmp_path: Path) -> None:
    what = study(PrepareConfig("one"), PrepareConfig("two"), starts=("two", "one"))
    runs = Planner(what, tmp_path, fake_compose).first()
    assert [str(run) for run in runs[:3]] == ["prepare one", "prepare two", "zero3 seed 1"]
    starts = {run.arm: run.config.model.start for run in runs}
    folder = tmp_path / "prepare"
    assert starts == {
        "one": None,
        "two": None,
        "zero3": str(folder / "two"),
        "a": str(folder / "one"),
    }
    assert [run.config.train.steps for run in runs[:1]] == [3], "the study's overrides hold"


def test_arms_wait_for_one_that_fails(tmp_path: Path) -> None:
    what = study(PrepareConfig("raises"))
    outcome, text = launch(what, tmp_path)
    assert started(tmp_path) == ["raises 1"]
    assert outcome.failed == ["prepare raises"]
    assert (len(outcome.waiting), outcome.exit_code, outcome.unfinished) == (4, 1, [])
    assert "No arm starts before prepare raises has finished." in text
    assert "Interrupted" not in text
    (tmp_path / "healed").touch()
    outcome, _ = launch(what, tmp_path)
    assert (len(outcome.finished), outcome.exit_code) == (5, 0)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"arm zero3: start=None.*one, two"):
        study(PrepareConfig("one"), PrepareConfig("two"))
    with pytest.raises(ValueError, match="start='one'"):
        study(starts=("one", None))
    with pytest.raises(ValueError):
        study(PrepareConfig("one"), PrepareConfig("one"))
    with pytest.raises(ValueError, match="prepare base: "):
        Planner(study(PrepareConfig("base", ["train.stepz=2"])), tmp_path, fake_compose)
