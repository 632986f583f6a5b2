"""The noise band: what a gap is beside it, and how it opens over training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.study.fake_seed import SOME, judged, two_baselines, with_gaps
from zpp_lab.study.judge.advice import advise
from zpp_lab.study.judge.noise import (
    Beside,
    beside,
    heldout_band,
    noise_bands,
    noise_of,
    one_seed,
    training_band,
)
from zpp_lab.study.report import page, writeup
from zpp_lab.study.report.curves import study_curves
from zpp_lab.study.report.figures.draw import left_out, make_figures
from zpp_lab.study.report.report import draw, find_out
from zpp_lab.study.report.table import console_table, margin_line, verdict_rows


def test_a_gap_lies_inside_above_or_below() -> None:
    texts = {gap: Beside(gap, 0.02).text for gap in (0.02, -0.014, 0.05, -0.03, 3.0)}
    assert texts == {
        0.02: "inside, 1.0×",
        -0.014: "inside, 0.7×",
        0.05: "above, 2.5×",
        -0.03: "below, 1.5×",
        3.0: "above, 150×",
    }


def test_only_arms_with_a_gap_and_a_control_stand_beside_a_band(tmp_path: Path) -> None:
    one = judged(tmp_path / "one", 1)
    bands = noise_bands(one)
    assert bands == {"zero3": noise_of(one, one.baseline)}
    placed = {arm.name: beside(one, arm, bands) for arm in one.arms}
    assert placed.pop("zero3") is None
    assert all(at is not None and at.noise == bands["zero3"] for at in placed.values())
    assert one_seed(one)
    assert not one_seed(judged(tmp_path / "two", 2))


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
    # Nothing after a step counts: the band opens where the runs part, not before.
    parting = training_band([{s: 0.0 if s < 60 else 0.3 for s in range(1, 101)}], {59, 60, 75})
    assert [r["high"] for r in parting] == [0.0, 0.3, 0.3]
    assert training_band([], {1}) == heldout_band([], {1}) == []


def test_a_study_has_both_gaps_and_their_bands(tmp_path: Path) -> None:
    curves = study_curves(judged(tmp_path, 2))
    assert {row["arm"] for row in curves.steps} == set(SOME) - {"zero3"}
    assert all(row["low"] <= row["mean"] <= row["high"] for row in curves.steps)
    assert {row["step"] for row in curves.noise["training"]} == {r["step"] for r in curves.steps}
    assert {row["step"] for row in curves.noise["held-out"]} == {r["step"] for r in curves.gap}
    strays = [abs(r["mean"]) for r in curves.gap if r["arm"] == "zero3_reordered"]
    assert max(row["high"] for row in curves.noise["held-out"]) >= max(strays) - 1e-12


# qsdp, w4 and the order control; the band is the last one's.
LOWER = {"zero3_reordered": -0.06, "qsdp": -0.09, "w4": -0.03}


def test_tables_say_where_a_gap_lies_instead_of_what_it_needs(tmp_path: Path) -> None:
    result = with_gaps(judged(tmp_path, 1), LOWER)
    rows = {row["Arm"]: row for row in verdict_rows(result)}
    cells = {name: row["Noise band"] for name, row in rows.items()}
    assert cells.pop("zero3_reordered") == "sets it"
    assert cells == {"zero3": "–", "qsdp": "below, 1.5×", "w4": "inside, 0.5×", "broken": "–"}
    assert rows["w4"]["Verdict"] == "undecided (one seed)"
    text = console_table(result)
    assert "below, 1.5×" in text
    assert "Noise band: ±0.0600 nats" in text
    assert dict(page.opening(result))["Noise band"] == "±0.0600 nats"
    for word in ("p-value", "interval of", "On par", "needs"):
        assert word not in text
    two = judged(tmp_path / "two", 2)
    assert "Noise band" not in verdict_rows(two)[0]
    assert "Noise band" not in dict(page.opening(two))
    assert "What it shows" not in dict(page.opening(two))


def test_advice_speaks_of_no_test(tmp_path: Path) -> None:
    said = advise(with_gaps(judged(tmp_path, 1), LOWER))
    assert [one.rule for one in said] == [7, 1, 5]
    assert said[0].text.startswith("No arm is advised in place of zero3: with one seed")
    assert said[1].text == "A control has no answer yet: broken (not run)."
    assert re.fullmatch(r"Worth more seeds.*: qsdp \(\d+.\d%\), w4 \(\d+.\d%\).", said[2].text)
    assert not any("needs" in one.text or "on par" in one.text for one in said)


def test_figures_of_one_seed_have_its_band_and_no_interval(tmp_path: Path) -> None:
    result = with_gaps(judged(tmp_path, 1), LOWER)
    made = {one.name: one for one in make_figures(result, study_curves(result))}
    assert not {"main_effects", "interactions"} & made.keys()
    gap = made["gap"].spec
    assert "seeds" not in gap["datasets"]
    assert {row["noise_to"] for row in gap["datasets"]["arms"]} == {0.06}
    labels = {row["arm"]: row["label"] for row in gap["datasets"]["arms"]}
    assert labels["qsdp"].endswith("below the noise band, 1.5×")
    assert labels["zero3_reordered"].endswith("sets the noise band")
    assert made["gap"].caption.endswith("Without a gap: broken (not run).")
    cost = made["gap_vs_bytes"].spec["datasets"]
    assert cost["bytes_total_noise"] == [{"low": -0.06, "high": 0.06}]
    assert not any(name.endswith("_front") for name in cost)
    for name in ("gap", "gap_vs_bytes", "loss", "gap_curves", "gap_steps"):
        for word in ("interval", "over the seeds", "{", "Dashed:"):
            assert word not in made[name].caption


def test_figures_of_several_seeds_keep_intervals_and_fronts(tmp_path: Path) -> None:
    two = judged(tmp_path, 2)
    made = {one.name: one for one in make_figures(two, study_curves(two))}
    assert "seeds" in made["gap"].spec["datasets"]
    assert not any("noise_to" in row for row in made["gap"].spec["datasets"]["arms"])
    assert "bytes_total_front" in made["gap_vs_bytes"].spec["datasets"]
    assert "95% interval" in made["gap"].caption
    assert left_out(two, study_curves(two)) == []


def test_what_would_show_nothing_is_left_out_and_named(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    for run in result.runs:
        file = run.dir / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[49].pop("telemetry")  # steps 1 and 100 are left
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = study_curves(result)
    assert not any(one.name.startswith("telemetry") for one in make_figures(result, curves))
    factors, telemetry = left_out(result, curves)
    assert "one seed" in factors
    assert "fewer than 3 steps" in telemetry
    found = find_out(tmp_path, result)
    assert not found.effects
    text = writeup.markdown(found, draw(found))
    assert telemetry in text
    assert "p (differs)" not in text
    assert "even where 0 lies outside" in text or not found.certainty.documents


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


def test_a_control_that_changed_nothing_and_none_are_no_band(tmp_path: Path) -> None:
    assert noise_bands(judged(tmp_path / "none", 1, ("zero3", "w4"))) == {}
    result, runs, name = judged(tmp_path / "equal", 1), tmp_path / "equal", Path("metrics.jsonl")
    shutil.copy(runs / "zero3" / "seed1" / name, runs / "zero3_reordered" / "seed1" / name)
    equal = with_gaps(result, {"zero3_reordered": 0.0, "w4": 0.5})
    assert noise_bands(equal) == {}
    assert "Noise band" not in verdict_rows(equal)[0]
