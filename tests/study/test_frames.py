"""`zpp_lab.load`: runs as DataFrames, and the notebook that shows it."""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path

import pytest

import zpp_lab
from tests.study.fake_runs import ARMS, fake_study, write_failure, write_study_runs
from zpp_lab.runs.reader import write_study
from zpp_lab.study.frames import Loaded

NOTEBOOK = Path(__file__).parents[2] / "examples" / "study.ipynb"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, two seeds of six steps; one run failed."""
    root = tmp_path_factory.mktemp("runs")
    study = fake_study((ARMS[0], ARMS[5]), seeds=2)
    write_study_runs(root, study, steps=6)
    study = fake_study((ARMS[0], ARMS[5], ARMS[6]), seeds=2)
    write_study(root, study)
    write_failure(root / "w2" / "seed1", ARMS[6], 1, "diverged", "loss is NaN")
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> Loaded:
    return zpp_lab.load(root)


def test_a_row_a_run_with_every_setting(found: Loaded) -> None:
    runs = found.runs.set_index("folder")
    assert list(found.runs["arm"]) == ["zero3", "zero3", "w4", "w4", "w2"]
    w4, w2 = runs.loc["w4/seed2"], runs.loc["w2/seed1"]
    summary = found.result.arms[1].runs[2].summary
    assert summary is not None
    assert (w4["name"], w4["recipe"], w4["outcome"], w4["step"]) == (
        "w4 seed2",
        "w4",
        "finished",
        6,
    )
    assert w4["gap"] == w4["heldout_loss"] - runs.loc["zero3/seed2", "heldout_loss"]
    for wire, hops in summary["bytes"].items():
        assert {hop: w4[f"bytes/{wire}/{hop}"] for hop in hops} == hops
    assert (w4["recipe.weights.bits"], w4["train.steps"], w4["seed"]) == (4, 6, 2)
    assert w4["quantized/weights_forward"] == 0.987
    assert (w2["outcome"], w2["step"]) == ("diverged", 100)
    assert math.isnan(w2["heldout_loss"])
    assert math.isnan(w2["gap"])


def test_a_row_a_step_of_a_run(found: Loaded) -> None:
    steps = found.steps
    assert len(steps) == 4 * 6 + 100
    lines = (found.folder / "w4" / "seed1" / "metrics.jsonl").read_text().splitlines()
    record, row = json.loads(lines[0]), steps.query("arm == 'w4' and seed == 1").iloc[0]
    assert [row[k] for k in ("step", "loss", "lr", "grad_norm", "tokens")] == [
        record[k] for k in ("step", "loss", "lr", "grad_norm", "tokens")
    ]
    assert row["bytes/grads_inter/inter"] == record["bytes"]["grads_inter"]["inter"]
    told = record["telemetry"]["weights_forward"]["mlp"]["nmse"]
    assert row["telemetry/weights_forward/mlp/nmse"] == told
    heldout = steps.query("arm == 'w4'")["heldout_loss"]
    assert heldout.notna().tolist() == ([False] * 5 + [True]) * 2


def test_a_row_an_arm_as_the_report_judges_it(found: Loaded) -> None:
    verdicts = found.verdicts.set_index("arm")
    for arm in found.result.arms:
        assert verdicts.loc[arm.name, "verdict"] == arm.verdict
    w4 = found.result.arms[1]
    assert w4.gap is not None
    assert tuple(verdicts.loc["w4", ["low", "high"]]) == w4.gap.shown
    assert verdicts.loc["w4", "bytes"] == w4.bytes_total
    assert any("w2: seed 1 diverged" in note for note in found.notes)


def test_it_is_shown_in_a_line(found: Loaded) -> None:
    arm = found.result.arms[0]
    for one in (found, found.result, arm, next(iter(arm.runs.values()))):
        assert len(repr(one)) < len(str(found.folder)) + 100
    assert "runs=5" in repr(found)


def test_without_pandas_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'zpp_lab\[report\]'"):
        zpp_lab.load(root)


def test_the_notebook_runs_and_holds_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell in one namespace; what a cell ends with is shown, so charts are drawn."""
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"], "the notebook is committed as it ran"
        *body, last = ast.parse("".join(cell["source"])).body
        assert isinstance(last, ast.Expr)
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        stored = cell["outputs"][0]["data"]
        if "image/png" in stored:
            assert value._repr_mimebundle_()[0]["image/png"]
        else:
            shown = value._repr_html_() if "text/html" in stored else repr(value)
            assert shown == "".join(stored["text/html" if "text/html" in stored else "text/plain"])
