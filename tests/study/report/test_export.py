from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.study.fake_runs import ARMS, fake_study, write_failure, write_study_runs
from zpp_lab.cli.main import main
from zpp_lab.runs.reader import write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.export import export
from zpp_lab.study.report.table import results_csv


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, two seeds of five steps; one run failed."""
    root = tmp_path_factory.mktemp("runs")
    study = fake_study((ARMS[0], ARMS[5], ARMS[6]), seeds=2)
    write_study_runs(root, study, steps=5)
    write_study(root, study)
    for path in (root / "w2" / "seed2").iterdir():
        path.unlink()
    (root / "w2" / "seed2").rmdir()
    write_failure(root / "w2" / "seed2", ARMS[6], 2, "diverged", "loss is NaN")
    return root


def test_one_row_a_run(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "runs.csv"
    assert main(["export", str(root), "--out", str(out)]) == 0
    assert "6 rows" in capsys.readouterr().out
    rows = list(csv.DictReader(out.open()))
    assert [(r["arm"], r["seed"], r["outcome"]) for r in rows[-3:]] == [
        ("w4", "2", "finished"),
        ("w2", "1", "finished"),
        ("w2", "2", "diverged"),
    ]
    w4 = rows[3]
    result = read_result(root)
    assert float(w4["gap"]) == result.arms[1].gaps[2]
    assert (w4["role"], w4["against"], w4["recipe.weights.bits"]) == ("arm", "zero3", "4")
    assert w4["folder"] == "w4/seed2"
    assert rows[0]["role"] == "baseline"
    assert rows[0]["recipe.weights.bits"] == rows[5]["heldout_loss"] == ""
    assert not (out.parent / ".runs.csv.tmp").exists()


def test_tensor_parts_and_stages_have_columns(root: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(root, tmp_path / "study"))
    path = root / "w4" / "seed1" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"cluster": {**summary["cluster"], "tp": 2}}))
    export([root], tmp_path / "runs.csv")
    rows = csv.DictReader((tmp_path / "runs.csv").open())
    found = {(r["arm"], r["seed"]): (r["tp"], r["pp"]) for r in rows}
    assert found.pop(("w4", "1")) == ("2", "1")
    assert found.pop(("w2", "2")) == ("", "")  # which has no summary
    assert set(found.values()) == {("1", "1")}


def test_accuracy_and_bits_a_byte_where_runs_have_them(root: Path, tmp_path: Path) -> None:
    """Runs of older versions, here all but one, have empty cells."""
    root = Path(shutil.copytree(root, tmp_path / "study"))
    path = root / "w4" / "seed2" / "summary.json"
    told = {"heldout_accuracy": 0.375, "heldout_bits_per_byte": 1.25}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    export([root], tmp_path / "runs.csv")
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    for key, value in told.items():
        found = {(row["arm"], row["seed"]): row[key] for row in rows}
        assert found.pop(("w4", "2")) == str(value)
        assert set(found.values()) == {""}
        table = results_csv(read_result(root))
        assert [row[key] for row in csv.DictReader(io.StringIO(table))].count(str(value)) == 1


def test_parquet_has_the_same_values_with_types(root: Path, tmp_path: Path) -> None:
    for suffix in ("csv", "parquet"):
        export([root], tmp_path / f"runs.{suffix}")
    table = pq.read_table(tmp_path / "runs.parquet").to_pylist()
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in table] == rows
    assert table[2]["recipe.weights.bits"] == 4
    assert isinstance(table[2]["heldout_loss"], float)
    assert table[0]["recipe.weights.bits"] is None


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_one_row_a_step(root: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"steps.{suffix}"
    expected = 5 * 5 + 100  # the failed run ended after a third of its 300 steps
    assert export([root], out, steps=True) == expected
    if suffix == "parquet":
        rows = pq.read_table(out).to_pylist()
        assert (rows[6]["arm"], rows[6]["seed"], rows[6]["step"]) == ("zero3", 2, 2)
        assert rows[4]["heldout_loss"] is not None
        assert rows[6]["bytes_intra"] > 0
        losses = {(r["arm"], r["seed"], r["step"]): r["loss"] for r in rows}
        for row in rows:
            other = losses.get(("zero3", row["seed"], row["step"]))
            assert row["gap"] == (None if other is None else row["loss"] - other)
        each = (rows[6]["tokens"] - rows[5]["tokens"]) / (rows[6]["seconds"] - rows[5]["seconds"])
        assert rows[6]["tokens_per_s"] == each
        assert rows[5]["tokens_per_s"] is None


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_only_a_table_of_runs_is_replaced(root: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"notes{suffix}"
    for steps in (False, True, False):
        assert export([root], out, steps) > 0
    out.write_text("")
    assert export([root], out) == 6
    out.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=rf"--out .*notes{re.escape(suffix)}"):
        export([root], out)
    assert out.read_text() == "a,b\n1,2\n"


def test_other_endings_and_a_missing_package_are_explained(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"\.csv or \.parquet"):
        export([root], tmp_path / "runs.xlsx")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"zpp_lab\[export\].*\.csv"):
        export([root], tmp_path / "runs.parquet")
    assert export([root], tmp_path / "runs.csv") == 6
    with pytest.raises(ValueError):
        export([root, root / "none"], tmp_path / "runs.csv")
