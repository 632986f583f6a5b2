"""A study's folder with a report in it, and the stand-in for wandb's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.conftest import be_patient, dead_server, fake_wandb, no_wandb_account
from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.runs.reader import write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.table import results_csv

__all__ = ["dead_server", "fake_wandb", "no_wandb_account"]


@pytest.fixture
def study_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three arms with three seeds, judged; the page itself is a stand-in, charts take seconds."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))  # tests share one process
    root, study = tmp_path / "study", fake_study(ARMS[:1] + ARMS[5:7])
    write_study_runs(root, study, steps=20)
    write_study(root, study)
    (root / "report.html").write_text("<h1>fake</h1>")
    (root / "results.csv").write_text(results_csv(read_result(root)))
    for config in root.rglob("config.yaml"):
        text = config.read_text().replace("project: null", "project: mine")
        config.write_text(text)
    be_patient(root)
    return root
