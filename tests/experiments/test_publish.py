"""A study's runs as the files of its page."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from runpy import run_path

import pytest
import yaml

from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.config.compose import compose
from zpp_lab.runs.reader import Run, write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.table import NOTHING
from zpp_lab.tools.plan.planner import Outlook
from zpp_lab.train.memory.buffers import GIB

SCRIPT = Path(__file__).parents[2] / "experiments" / "publish.py"
ROLES = {"zero3_reordered": "order_control", "broken": "negative_control"}


def test_a_page_has_curves_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = fake_study(tuple(a for a in ARMS if a.name in ("zero3", "w4", *ROLES)), seeds=1)
    arms = [replace(arm, role=ROLES.get(arm.name, "arm")) for arm in study.arms]
    root, page = tmp_path / "runs", tmp_path / "page"
    write_study_runs(root, replace(study, arms=arms), steps=40)
    write_study(root, replace(study, arms=arms))
    summary = root / "w4" / "seed1" / "summary.json"
    peaks = {"peak_gib": [61.25, 64.5]}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | peaks))
    real = compose(["engine=fsdp", "recipe=broken", "cluster=1x2", "tracking.wandb=off"])
    (root / "broken" / "seed1" / "config.yaml").write_text(yaml.safe_dump(asdict(real)))
    summary = root / "broken" / "seed1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | peaks))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(root), str(page)])
    assert run_path(str(SCRIPT))["main"]() == 0
    with (page / "results.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 4 * 40
    last = next(r for r in rows if r["arm"] == "w4" and r["step"] == "40")
    assert float(last["tokens_per_s"]) == pytest.approx(10240)
    assert {"seed", "loss", "heldout_loss", "bytes_intra", "bytes_inter", "gap"} <= set(last)
    table = (page / "table.md").read_text().splitlines()
    w4 = [cell.strip() for cell in next(r for r in table if r.startswith("| w4")).split("|")]
    assert w4[7:9] == ["0.100", "10,240"]
    assert w4[12:14] == ["64.50", NOTHING]  # one process played all ranks: nothing was planned
    broken = [cell.strip() for cell in next(r for r in table if "| broken" in r).split("|")]
    planned = Outlook.of(real, 0).estimate.tensors / GIB
    assert broken[12:14] == ["64.50", f"{planned:.2f}"]  # a process a rank
    assert w4[5].startswith("above, ")  # the noise band
    assert any(line.startswith("- Commit: 0123456789") for line in table)
    assert {p.name for p in (page / "figures").iterdir()} >= {"gap_steps.svg", "loss.svg"}
    assert "With one seed an arm nothing is tested" in (page / "report.md").read_text()
    assert not list((page / "figures").glob("*.pdf"))


def test_runs_of_several_commits_and_of_none_are_told(tmp_path: Path) -> None:
    arms = tuple(arm for arm in ARMS if arm.name in ("zero3", "w4"))
    study = fake_study(arms, seeds=3)
    write_study_runs(tmp_path, study, steps=3)
    write_study(tmp_path, study)
    for seed, commit in ((1, "f" * 40 + "-dirty"), (3, None)):
        summary = tmp_path / "w4" / f"seed{seed}" / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"commit": commit}))
    text = run_path(str(SCRIPT))["table"](read_result(tmp_path))
    (line,) = [row for row in text.splitlines() if row.startswith("- Commit: ")]
    assert set(line.removeprefix("- Commit: ").split("; ")) == {
        "0123456789abcdef0123456789abcdef01234567 (4 runs)",
        f"{'f' * 40}-dirty (1 run)",
        "not recorded (1 run)",
    }


def test_without_runs_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = [sys.executable, str(SCRIPT), str(tmp_path / "empty"), str(tmp_path / "page")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page").exists()


def test_a_plan_needs_no_file_of_the_machine_that_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned_gib = run_path(str(SCRIPT))["planned_gib"]
    words = ["engine=fsdp", "cluster=1x2", "data.tokenizer=hf", "data.tokenizer_path=gone"]
    config = asdict(compose([*words, "tracking.wandb=off"]))
    run = Run(tmp_path, "w4", 1, config, {}, None)
    assert planned_gib([run]) is None
    assert "no plan beside its peak: data.tokenizer_path=gone" in capsys.readouterr().err
    (tmp_path / "data.json").write_text(json.dumps({"vocab_size": 300}))
    bpe = compose(["engine=fsdp", "cluster=1x2", "data.tokenizer=bpe", "data.vocab_size=300"])
    assert planned_gib([run]) == Outlook.of(bpe, 0).estimate.tensors / GIB


def test_a_page_is_checked_against_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["arm,seed,step,heldout_loss", "w4,1,20,9.0", "w4,1,40,2.0", "w4,2,40,2.5", "w4,3,20,9"]
    (tmp_path / "results.csv").write_text("\n".join(rows) + "\n")
    page = tmp_path / "README.md"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check", str(tmp_path)])
    text = "# One\n\n| Arm | Held-out loss |\n|---|---|\n| `w4` | {} |\n\n[x]({})\n"
    page.write_text(text.format("2.250", "#one"))
    assert run_path(str(SCRIPT))["main"]() == 0
    page.write_text(text.format("2.251", "gone.md"))
    assert run_path(str(SCRIPT))["main"]() == 1
    said = capsys.readouterr().out
    assert "w4: 2.251, but 2.250 in results.csv" in said
    assert "gone.md: no such file" in said
