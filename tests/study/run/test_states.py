"""Readers tell a run that was stopped from one that failed and from one that was never started."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.study.fake_runs import ARMS, fake_study, write_failure, write_run
from zpp_lab.files import hold
from zpp_lab.runs.reader import last_step, reached, read_run, state, unfinished_text, write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.table import results_csv

BY_NAME = {arm.name: arm for arm in ARMS}
NAMES = ("zero3", "w6", "w4", "w2", "qsdp", "zeropp", "broken")


def cut(folder: Path, name: str, seed: int, step: int) -> None:
    """A run that was killed after `step`, in the middle of the next line."""
    write_run(folder, BY_NAME[name], seed, study="fake")
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:step]) + lines[step][:20])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of seven arms two finished (w6 one of two seeds), the others in each way that there is."""
    root = tmp_path_factory.mktemp("states")
    for name, seed in (("zero3", 1), ("zero3", 2), ("w6", 1)):
        write_run(root / name / f"seed{seed}", BY_NAME[name], seed, study="fake")
    cut(root / "w6" / "seed2", "w6", 2, 299)  # but for one step
    error = "RuntimeError: the wire broke\nand more"
    write_failure(root / "w4" / "seed1", BY_NAME["w4"], 1, "crashed", error)
    write_failure(root / "w2" / "seed1", BY_NAME["w2"], 1, "diverged", "loss is NaN")
    cut(root / "zeropp" / "seed1", "zeropp", 1, 120)
    begun = root / "broken" / "seed1"  # killed while it compiled: its log is all
    begun.mkdir(parents=True)
    (begun / "log.txt").write_text("building\n")
    study = fake_study(tuple(BY_NAME[n] for n in NAMES), seeds=2)
    arms = [
        replace(a, role="negative_control" if a.name == "broken" else a.role) for a in study.arms
    ]
    write_study(root, replace(study, arms=arms))
    return root


@pytest.mark.parametrize(
    ("arm", "verdict"),
    [
        ("w6", "undecided (one seed)"),
        ("w4", "failed (crashed after step 100 of 300)"),
        ("w2", "diverged (1 of 2 seeds)"),
        ("qsdp", "not run (never started)"),
        ("zeropp", "unfinished (1 of 2 runs began; the furthest is after step 120 of 300)"),
        ("broken", "unfinished (1 of 2 runs began; the furthest is before step 1)"),
    ],
)
def test_the_verdict_says_what_became_of_the_runs(root: Path, arm: str, verdict: str) -> None:
    (found,) = [a for a in read_result(root).arms if a.name == arm]
    assert found.text == verdict


def test_partial_runs_enter_no_number(root: Path) -> None:
    """Only w6's whole seed is judged, though the other lacks one step; its bytes count alike."""
    arms = {arm.name: arm for arm in read_result(root).arms}
    assert list(arms["w6"].gaps) == [1]
    assert arms["w6"].heldout_loss == arms["w6"].runs[1].heldout_loss
    assert [run.seed for run in arms["w6"].finished] == [1]
    for name in ("w4", "w2", "qsdp", "zeropp", "broken"):
        arm = arms[name]
        assert (arm.gaps, arm.gap, arm.heldout_loss, arm.bytes_total) == ({}, None, None, None)
    rows = {(r["arm"], r["seed"]): r for r in csv.DictReader(results_csv_lines(root))}
    assert rows["zeropp", "1"]["heldout_loss"] == rows["zeropp", "1"]["steps"] == ""
    assert (rows["zeropp", "1"]["last_step"], rows["zeropp", "1"]["planned_steps"]) == (
        "120",
        "300",
    )


def results_csv_lines(root: Path) -> list[str]:
    return results_csv(read_result(root)).splitlines()


def test_a_run_that_is_held_is_running(tmp_path: Path) -> None:
    folder = tmp_path / "w6" / "seed1"
    cut(folder, "w6", 1, 7)
    assert state(read_run(folder)) == "stopped"
    with hold(folder):
        run = read_run(folder)
        assert (state(run), reached(run)) == ("running", "after step 7 of 300")
        assert unfinished_text(run, several=True) == "are running after step 7 of 300"
    assert unfinished_text(None) == "has not been started"


def test_the_last_step_is_found_behind_a_long_line(tmp_path: Path) -> None:
    lines = [json.dumps({"step": s, "telemetry": "x" * 90_000}) + "\n" for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert last_step(tmp_path) == 2
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    assert last_step(tmp_path) == 1
