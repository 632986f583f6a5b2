from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import ttest_ind

from tests.study.fake_runs import ARMS, FakeArm, fake_study, write_run
from zpp_lab.cli import main
from zpp_lab.study.compare import compare, difference_rows, rows, short_names
from zpp_lab.study.runs import find_runs, write_study

ZERO3, QSDP, W4 = ARMS[0], ARMS[3], ARMS[5]


def study(root: Path, *arms: FakeArm, seeds: int = 4, steps: int = 3, commit: str = "") -> Path:
    what = fake_study(arms, seeds)
    for arm in arms:
        for seed in what.seeds:
            write_run(root / arm.name / f"seed{seed}", arm, seed, steps, what.name)
    write_study(root, what)
    for run in find_runs(root):
        summary = dict(run.summary or {})
        summary["commit"] = commit or summary["commit"]
        (run.dir / "summary.json").write_text(json.dumps(summary))
    return root


def test_arms_are_lined_up_with_what_changed(tmp_path: Path) -> None:
    one = study(tmp_path / "one", ZERO3, QSDP, W4)
    two = study(tmp_path / "two", ZERO3, replace(W4, gap=0.2, weight_bits=2), steps=5, commit="abc")
    found = compare([one, two])
    assert found.names == ["one", "two"]
    assert [arm.name for arm in found.arms] == ["zero3", "qsdp", "w4"]
    assert found.arms[1].results[1] is None
    w4 = found.arms[2]
    assert w4.recipe == {"recipe.weights.bits": [4, 2]}
    gaps = [list(r.gaps.values()) for r in w4.results if r is not None]
    shift = w4.shifts[1]
    assert shift is not None
    assert shift.mean == pytest.approx(0.155, abs=0.02)
    welch = ttest_ind(gaps[1], gaps[0], equal_var=False).confidence_interval(0.95)
    assert shift.interval == pytest.approx((welch.low, welch.high))
    assert shift.differs
    assert found.differences["commit"][1] == "abc"
    assert found.differences["train.steps"] == [3, 5]
    assert not any(key.startswith(("recipe.", "run.", "seed")) for key in found.differences)
    assert "data.hash" not in found.differences  # the same in both


def test_equal_studies_do_not_differ(tmp_path: Path) -> None:
    found = compare([study(tmp_path / name / "runs", ZERO3, W4) for name in "ab"])
    assert found.names == ["a/runs", "b/runs"]
    assert not found.differences
    assert difference_rows(found) == []
    assert rows(found)[1][5] == "0.0000 ± " + rows(found)[1][5].split("± ")[1]


def test_console_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [study(tmp_path / n, ZERO3, W4, commit=n) for n in ("one", "two", "<3>")]
    for ending in ("csv", "md", "html"):
        out = tmp_path / "out" / f"compared.{ending}"
        assert main(["compare", *map(str, folders), "--out", str(out)]) == 0
        text = out.read_text()
        assert "w4" in text
        assert ("commit" in text) == (ending != "csv")
        assert ("<3>" in text) == (ending != "html")  # escaped there
        assert ("<script" in text) is False
    said = capsys.readouterr().out
    assert "What else differs" in said
    assert "Welch" in said


def test_mistakes_are_explained(tmp_path: Path) -> None:
    one = study(tmp_path / "one", ZERO3, seeds=1)
    with pytest.raises(ValueError, match="two folders"):
        compare([one])
    with pytest.raises(ValueError, match="given twice"):
        compare([one, one])
    with pytest.raises(ValueError, match="given twice"):
        short_names([Path("/a/b"), Path("/a/b")])
    other = study(tmp_path / "two", replace(ZERO3, name="zero3"), seeds=1)
    found = compare([one, other])
    assert found.arms[0].shifts[1] is None  # baselines have no gap
    assert main(["compare", str(one), str(other), "--out", str(tmp_path / "x.pdf")]) == 2
