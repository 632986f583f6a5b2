"""Runs of one recipe that differ in other settings are ranked, with no baseline asked for."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from tests.study.fake_runs import ARMS, write_run
from zpp_lab.runs.reader import find_runs
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.report import build_report
from zpp_lab.study.report.trials import find_trials, trials_console

ZERO3, ZEROPP = ARMS[0], ARMS[2]
LOSSES = {1e-4: 3.2, 1e-3: 2.4, 1e-2: 2.6}  # of a rate


def write_trials(root: Path, task: str = "text") -> None:
    for i, (rate, loss) in enumerate(LOSSES.items()):
        folder = root / f"trial{i}"
        write_run(folder, ZEROPP, 1, 50)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["task"] = task
        config["train"] |= {"lr": rate, "warmup_steps": 10 * (1 + i % 2)}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"heldout_loss": loss}))


def test_trials_are_ranked_with_the_best_settings_first(tmp_path: Path) -> None:
    write_trials(tmp_path)
    found = find_trials(read_result(tmp_path))
    assert found is not None
    assert found.keys == ["train.lr", "train.warmup_steps"]
    ranked = [(trial.settings["train.lr"], trial.loss) for trial in found.ranked]
    assert ranked == sorted(LOSSES.items(), key=lambda item: item[1])
    assert found.best is not None
    assert found.best.settings == {"train.lr": 1e-3, "train.warmup_steps": 20}
    rows = [line.split() for line in trials_console(found).splitlines()[2:5]]
    assert [row[:4] for row in rows] == [
        ["1", "0.001", "20", "2.4000"],
        ["2", "0.01", "10", "2.6000"],
        ["3", "0.0001", "10", "3.2000"],
    ]


def test_their_report_has_the_settings_against_the_loss(tmp_path: Path) -> None:
    write_trials(tmp_path)
    unfinished = tmp_path / "trial3"
    write_run(unfinished, ZEROPP, 1, 60)
    (unfinished / "summary.json").unlink()
    report = build_report(tmp_path)
    assert {"trials", "loss"} <= {path.stem for path in report.figures}
    text = report.markdown.read_text()
    assert "train.lr=0.001" in text.split("## ")[1]  # the answer
    assert "no baseline" not in text + report.table
    rows = report.table.partition("─\n")[2].splitlines()
    assert rows[3].split()[0] == "–"  # no loss yet: last, without a rank
    assert len(list(csv.DictReader(report.csv.open()))) == 4
    assert len(report.html.read_text()) < 3e6


@pytest.mark.parametrize(("task", "unit"), [("rl", "failures"), ("reward", "a pair")])
def test_trials_speak_in_the_unit_of_their_task(tmp_path: Path, task: str, unit: str) -> None:
    write_trials(tmp_path, task)
    report = build_report(tmp_path)
    for text in (report.markdown.read_text(), report.table):
        assert unit in text
        assert "nats a token" not in text
        assert "erplexity" not in text


@pytest.mark.parametrize("other", ["recipe", "baseline"])
def test_arms_and_their_baseline_are_no_trials(tmp_path: Path, other: str) -> None:
    write_trials(tmp_path)
    write_run(tmp_path / "other", ARMS[5] if other == "recipe" else ZERO3, 1, 50)
    assert len(find_runs(tmp_path)) == 4
    assert find_trials(read_result(tmp_path)) is None
