"""The live table and the dry run, read from folders that a fake trainer wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.study.fake_trainer import STEPS, fake_compose
from tests.study.test_launch import ENTRY, launch, started, study
from zpp_lab.cli import main
from zpp_lab.study import cost
from zpp_lab.study.dry_run import amount, dry_run
from zpp_lab.study.locks import held, hold
from zpp_lab.study.runs import write_study
from zpp_lab.study.watch import RunState, Watch, seconds_left, show


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=140), out


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


def test_the_table_is_readable_without_a_terminal(tmp_path: Path) -> None:
    launch(study("zero3", "diverges"), tmp_path)
    console, out = plain()
    show(tmp_path, study("zero3"), console)
    text = out.getvalue()
    assert "test: 2 of 4 runs finished, 2 diverged, no process is at work here" in text
    assert "2.5150" in text  # the mean of the baseline's held-out losses
    assert "\x1b" not in text


def test_seeds_that_were_added_are_shown(tmp_path: Path) -> None:
    launch(study("zero3", "a", seeds=3), tmp_path)
    write_study(tmp_path, study("zero3", "a", seeds=1))
    assert [s.seed for s in Watch(tmp_path).look()] == [1, 2, 3] * 2


def test_time_left_is_the_work_over_the_runs_side_by_side() -> None:
    states = [
        RunState("a", 1, "finished", 100, 100, 50.0),
        RunState("a", 2, "running", 50, 100, 25.0),
        RunState("a", 3, "running", 50, 100, 25.0),
        RunState("a", 4, "waiting"),
    ]
    assert seconds_left(states) == pytest.approx(0.5 * (50 + 50 + 100) / 2)
    assert seconds_left([RunState("a", 1, "waiting")]) is None


def test_watching_nothing_is_answered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no study has been started here"):
        show(tmp_path / "none", study("zero3"))
    assert main(["study", "smoke", "--watch", "--dir", str(tmp_path / "none")]) == 2
    assert main(["study", "smoke", "--seeds", "1,two"]) == 2


def test_a_dry_run_measures_each_shape_once_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "step_bytes", lambda config: 1000)
    what = study("zero3", "a")
    console, out = plain()
    found = dry_run(what, tmp_path, 2, compose=fake_compose, entry=ENTRY, console=console)
    assert not (tmp_path / "zero3").exists()
    assert [f.bytes for f in found.runs] == [1000 * STEPS] * 4
    assert found.runs[0].seconds == pytest.approx(0.1 * STEPS)
    assert found.seconds == pytest.approx(4 * 0.1 * STEPS / 2)
    assert "4 runs, 0 ended already; about 0:01 left with 2 side by side" in out.getvalue()
    assert len(list((tmp_path / cost.FOLDER).glob("*.json"))) == 1

    monkeypatch.setattr(cost, "_calibrate", lambda *_: pytest.fail("measured twice"))
    launch(study("zero3", seeds=1), tmp_path)
    before = started(tmp_path)
    console, out = plain()
    found = dry_run(what, tmp_path, 2, compose=fake_compose, entry=ENTRY, console=console)
    assert started(tmp_path) == before
    assert [f.state for f in found.runs].count("finished") == 1
    assert "1 finished" in out.getvalue()


def test_a_shape_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "step_bytes", lambda config: 1000)
    console, out = plain()
    found = dry_run(study("exits", "zero3"), tmp_path, 1, compose=fake_compose,
                    entry="tests.study.fake_trainer:fail", console=console)  # fmt: skip
    assert "no cost for the shape of zero3: crashed: " in out.getvalue()
    assert "exit code 1" in found.faults[0]
    assert found.runs[0].seconds is None


def test_amounts_are_for_people() -> None:
    assert [amount(n) for n in (0, 999, 1500, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 GB",
        "3e+03 TB",
    ]


def test_a_calibration_leaves_out_warm_up_and_evaluation() -> None:
    config = fake_compose(["train.steps=100", "train.eval_every=10"])
    rows = [{"seconds": s} for s in (9.0, 10.0, 10.5, 11.0, 11.5, 14.0)]
    found = cost._cost(rows, config, None)
    assert found.step_seconds == pytest.approx(0.5)
    assert found.other_seconds == pytest.approx(2.0 * 12)
    assert json.dumps(found.seconds(100)) == "74.0"
