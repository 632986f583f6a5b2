"""The second readout beside the held-out gap: training loss over the last steps."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import StudyResult, read_result
from zpp_lab.study.report.table import READOUT, console_table, results_csv, verdict_rows

LOSSES = {"zero3": (2.0, 2.1, 2.2), "w4": (2.01, 2.13, 2.24)}
GAPS = [0.01, 0.03, 0.04]


def result(root: Path, steps: dict[str, int]) -> StudyResult:
    """Of two arms with three seeds; steps: what each arm's readout is a mean over, 0 for none."""
    study = fake_study((ARMS[0], ARMS[5]))
    write_study_runs(root, study, steps=20)
    for arm, count in steps.items():
        for seed, loss in enumerate(LOSSES[arm], 1):
            file = root / arm / f"seed{seed}" / "summary.json"
            summary = json.loads(file.read_text())
            more = {"readout_loss": loss, "readout_steps": count} if count else {}
            file.write_text(json.dumps(summary | more))
    return read_result(root, study)


def test_its_gap_is_paired_with_an_interval_and_moves_no_verdict(tmp_path: Path) -> None:
    plain = result(tmp_path / "plain", {})
    found = result(tmp_path / "found", {"zero3": 10, "w4": 10})
    base, w4 = found.arms
    gap = found.readout_gap(w4)
    assert gap is not None
    assert gap.mean == pytest.approx(fmean(GAPS))
    assert gap.interval == pytest.approx(t_interval(GAPS, 0.95))
    assert found.readout_gap(base) is None
    assert [arm.text for arm in found.arms] == [arm.text for arm in plain.arms]
    row = verdict_rows(found)[1]
    assert list(row).index(READOUT) == list(row).index("Gap (nats)") + 1
    assert row[READOUT] == "+0.0267 ± 0.0379"
    assert "mean training loss of the last 10 steps" in console_table(found)
    rows = list(csv.DictReader(io.StringIO(results_csv(found))))
    assert [float(row["readout_loss"]) for row in rows[3:]] == list(LOSSES["w4"])
