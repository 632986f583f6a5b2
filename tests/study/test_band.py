"""The noise band: what one seed can say, and what it must not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.config import StudyConfig
from zpp_lab.study import page
from zpp_lab.study.band import band_lines, heldout_band, noise_of, training_band
from zpp_lab.study.certainty import certainty
from zpp_lab.study.curves import study_curves
from zpp_lab.study.figures import make_figures
from zpp_lab.study.runs import find_runs
from zpp_lab.study.table import margin_line
from zpp_lab.study.verdict import StudyResult, judge_study

ROLES = {"zero3_reordered": "order_control", "broken": "negative_control"}
SOME = ("zero3", "zero3_reordered", "qsdp", "w4", "broken")


def judged(root: Path, seeds: int, names: tuple[str, ...] = SOME) -> StudyResult:
    study = fake_study(tuple(arm for arm in ARMS if arm.name in names), seeds)
    arms = [replace(arm, role=ROLES.get(arm.name, "arm")) for arm in study.arms]
    study = StudyConfig(**{**study.__dict__, "arms": arms})
    write_study_runs(root, study, steps=100)
    return judge_study(study, find_runs(root))


def test_one_seed_is_told_beside_the_order_control(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    noise = noise_of(result, result.baseline)
    gaps = {arm.name: arm.gaps[1] for arm in result.arms if arm.name != "zero3"}
    assert noise == abs(gaps["zero3_reordered"])
    (line,) = band_lines(result)
    assert f"strays up to {noise:.1e} nats from it" in line
    inside, _, beyond = line.partition("Beyond it: ")
    for name in ("qsdp", "w4", "broken"):
        assert (f"{name} (" in inside) == (abs(gaps[name]) <= noise)
        assert (f"{name} (" in beyond) == (abs(gaps[name]) > noise)
    assert f"{gaps['broken'] / noise:,.1f} times" in beyond
    assert certainty(result).lines()[-1] == line


def test_the_band_is_no_narrower_where_two_curves_happen_to_cross(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    file = result.baseline.runs[1].dir.parents[1] / "zero3_reordered" / "seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, strays in ((rows[39], 9.0), (rows[79], 0.5)):
        row["heldout_loss"] = 3.0 + strays
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = result.baseline.runs[1].dir / "metrics.jsonl"
    rows = [json.loads(line) for line in base.read_text().splitlines()]
    rows[39]["heldout_loss"] = rows[79]["heldout_loss"] = 3.0
    base.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert noise_of(result, result.baseline) == pytest.approx(0.5)  # step 40 is the first half's


def test_a_lone_seed_neither_holds_nor_breaks_a_control(tmp_path: Path) -> None:
    one = judged(tmp_path / "one", 1)
    assert [c.untested for c in one.controls] == [True, True]
    assert not any(c.ok for c in one.controls)
    assert page.controls_hold(one)
    assert "one seed, which no test can judge (gap +1.3" in one.controls[1].text
    three = judged(tmp_path / "three", 3)
    assert not any(c.untested for c in three.controls)
    assert page.controls_hold(three)
    assert band_lines(three) == []  # their noise floor says more


def test_without_an_order_control_that_is_said(tmp_path: Path) -> None:
    (line,) = band_lines(judged(tmp_path, 1, ("zero3", "w4")))
    assert "nothing is tested" in line
    assert "order control" in line


def test_a_control_that_changed_nothing_is_no_band(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    runs = result.baseline.runs[1].dir.parents[1]
    own, other = (runs / name / "seed1" for name in ("zero3", "zero3_reordered"))
    shutil.copy(own / "metrics.jsonl", other / "metrics.jsonl")
    heldout = json.loads((own / "summary.json").read_text())["heldout_loss"]
    summary = json.loads((other / "summary.json").read_text()) | {"heldout_loss": heldout}
    (other / "summary.json").write_text(json.dumps(summary))
    (line,) = band_lines(judge_study(result.study, find_runs(tmp_path)))
    assert "zero3_reordered equals it in every digit" in line
    assert "Inside" not in line
    assert "Beyond" not in line


def two_baselines(root: Path) -> StudyResult:
    """zeropp stands against qsdp, the rest against zero3."""
    study = fake_study(tuple(arm for arm in ARMS if arm.name in (*SOME, "zeropp")), 1)
    roles = {**ROLES, "qsdp": "baseline"}
    arms = [replace(arm, role=roles.get(arm.name, "arm")) for arm in study.arms]
    arms = [replace(arm, against="qsdp") if arm.name == "zeropp" else arm for arm in arms]
    study = StudyConfig(**{**study.__dict__, "arms": arms})
    if not root.exists():
        write_study_runs(root, study, steps=100)
    return judge_study(study, find_runs(root))


def test_a_baseline_without_a_control_looks_at_the_others(tmp_path: Path) -> None:
    result = two_baselines(tmp_path / "runs")
    noise = noise_of(result, result.baseline)
    own, other = band_lines(result)
    assert "zeropp" not in own
    assert other.startswith("qsdp has one seed, so nothing is tested")
    assert other.endswith(f"stray up to {noise:.1e} nats from zero3.")


def test_figures_need_no_run_of_the_studys_own_baseline(tmp_path: Path) -> None:
    """A piece of a study may hold the arms of another baseline alone."""
    two_baselines(tmp_path / "runs")
    for name in ("zero3", "zero3_reordered", "w4", "broken"):
        shutil.rmtree(tmp_path / "runs" / name)
    result = two_baselines(tmp_path / "runs")
    others = next(arm for arm in result.arms if arm.name == "qsdp")
    assert result.margin == others.margin
    assert "nothing to compare" not in margin_line(result)
    made = {figure.name for figure in make_figures(result, study_curves(result))}
    assert {"gap", "gap_curves", "gap_steps", "loss"} <= made


def test_bands_are_symmetric_and_as_wide_as_the_largest() -> None:
    runs = [{1: 0.5, 2: -0.1, 40: 0.0}, {40: 0.2}]
    near = training_band(runs, {1, 2, 20, 40})
    assert [(r["step"], r["low"], r["high"]) for r in near] == [
        (1, -0.5, 0.5),
        (2, -0.5, 0.5),
        (40, -0.2, 0.2),
    ]
    exact = heldout_band(runs, {2, 40})
    assert [(r["step"], r["high"]) for r in exact] == [(2, 0.1), (40, 0.2)]
    assert training_band([], {1}) == heldout_band([], {1}) == []


def test_a_study_has_both_gaps_and_their_bands(tmp_path: Path) -> None:
    curves = study_curves(judged(tmp_path, 2))
    assert {row["arm"] for row in curves.steps} == set(SOME) - {"zero3"}
    assert all(row["low"] <= row["mean"] <= row["high"] for row in curves.steps)
    assert {row["step"] for row in curves.noise["training"]} == {r["step"] for r in curves.steps}
    assert {row["step"] for row in curves.noise["held-out"]} == {r["step"] for r in curves.gap}
    strays = [abs(r["mean"]) for r in curves.gap if r["arm"] == "zero3_reordered"]
    assert max(row["high"] for row in curves.noise["held-out"]) >= max(strays) - 1e-12
