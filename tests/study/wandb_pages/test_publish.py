"""A study's report in wandb: the artifact, the tables, the group; and what a dead server costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.conftest import FakeWandb, be_patient
from tests.runs.wandb_file import OfflineRun
from zpp_lab.study.wandb_pages import publish


def test_the_report_is_an_artifact_in_the_studys_group(study_root: Path) -> None:
    handle = publish.start(study_root)
    assert handle.wait(240.0), (study_root / publish.LOG).read_text()
    run = OfflineRun(study_root)
    assert (run.run.run_group, run.run.job_type) == ("fake", "report")
    assert (run.run.project, run.run.display_name) == ("mine", "fake report")
    (artifact,) = (a for a in run.artifacts if a.type == "report")  # tables are artifacts too
    assert artifact.name == "fake-report"
    files = {entry.path for entry in artifact.manifest.contents}
    assert {"report.html", "results.csv"} <= files
    (row,) = run.history
    for name, columns in (("verdicts", "Verdict"), ("results", "heldout_loss")):
        assert row[f"{name}/_type"] == "table-file"
        files_of_run = next(study_root.glob("wandb/offline-*/files"))
        table = json.loads((files_of_run / row[f"{name}/path"]).read_text())
        assert columns in table["columns"]
        assert table["data"][0][0] == "zero3"
    state = json.loads((study_root / publish.STATE).read_text())
    assert (state["state"], state["mode"]) == ("complete", "offline")


def test_sync_sends_it_online(
    study_root: Path, fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish.sync([study_root, study_root.parent]) == 0  # the other one is no study
    ((run_id, run),) = fake_wandb.runs.items()
    assert run_id in capsys.readouterr().out
    assert (run["group"], run["job_type"], run["display"]) == ("fake", "report", "fake report")
    assert run["exit"] == 0
    (report,) = (a for a in fake_wandb.artifacts if a["artifactTypeName"] == "report")
    assert report["artifactCollectionName"] == "fake-report"
    assert any("verdicts" in name for name in fake_wandb.files)
    first = json.loads((study_root / publish.STATE).read_text())
    assert publish.sync([study_root]) == 0
    assert len(fake_wandb.runs) == 1  # the same run again
    assert json.loads((study_root / publish.STATE).read_text()) == first


def test_nothing_is_sent_without_a_report_or_with_wandb_off(
    tmp_path: Path, study_root: Path
) -> None:
    assert publish.start(tmp_path).pid is None
    with pytest.raises(ValueError, match="zpp-lab report"):
        publish.publish(tmp_path, "offline")
    assert publish.sync([tmp_path]) == 0


def test_a_dead_server_is_one_line_and_a_second_chance(
    study_root: Path, dead_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    be_patient(study_root, 1.5)
    assert publish.sync([study_root]) == 1
    assert "the report was not sent to wandb: CommError" in capsys.readouterr().err
    state = json.loads((study_root / publish.STATE).read_text())
    assert state["state"] == "failed"
