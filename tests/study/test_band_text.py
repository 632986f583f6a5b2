"""What a study with one seed says, and what it must not."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from tests.study.fake_seed import judged, two_baselines, with_gaps
from zpp_lab.study import page, writeup
from zpp_lab.study.advice import advise
from zpp_lab.study.band import noise_of
from zpp_lab.study.band_text import band_lines, conclusion
from zpp_lab.study.certainty import certainty
from zpp_lab.study.curves import study_curves
from zpp_lab.study.figures import left_out, make_figures
from zpp_lab.study.report import draw, find_out
from zpp_lab.study.runs import find_runs
from zpp_lab.study.table import console_table, margin_line, verdict_rows
from zpp_lab.study.verdict import judge_study


def test_one_seed_is_told_beside_the_order_control(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    noise = noise_of(result, result.baseline)
    assert noise
    gaps = {arm.name: arm.gaps[1] for arm in result.arms if arm.name != "zero3"}
    assert noise == abs(gaps["zero3_reordered"])
    (line,) = band_lines(result)
    assert f"±{noise:.1e} nats, by zero3_reordered" in line
    above, _, rest = line.partition(" Inside it: ")
    for name in ("qsdp", "w4", "broken"):
        assert (f"{name} (" in above) == (gaps[name] > noise)
        assert (f"{name} (" in rest) == (gaps[name] <= noise)
    assert f"{gaps['broken'] / noise:,.0f}×" in above
    assert line in certainty(result).lines()


# qsdp, w4 and the order control; the band is the last one's.
LOWER = {"zero3_reordered": -0.06, "qsdp": -0.09, "w4": -0.03}


def test_no_arm_above_the_band_shows_no_cost_and_no_gain(tmp_path: Path) -> None:
    result = with_gaps(judged(tmp_path, 1), LOWER)
    said = conclusion(result)
    assert said.startswith("With one seed an arm nothing is tested. No arm ended above the noise")
    assert "(±0.0600 nats, one draw): nothing here shows that fewer bits cost anything." in said
    assert "qsdp ended below it (1.5×), with a lower loss. That shows no gain either" in said
    assert "zero3_reordered ended below that run as well" in said
    assert "negative control broken has no answer (not run)" in said
    (line,) = band_lines(result)
    assert "Above it, with a higher loss: none. Inside it: w4 (−0.0300, 0.5×)." in line
    assert "the arms' gaps go from −0.0300 to +0.0300." in line


def test_an_arm_above_the_band_is_a_sign_and_no_verdict(tmp_path: Path) -> None:
    gaps = {"zero3_reordered": 0.002, "qsdp": 0.004, "w4": 0.3, "broken": 1.2}
    result = with_gaps(judged(tmp_path, 1), gaps)
    said = conclusion(result)
    assert "qsdp and w4 ended above the noise band" in said
    assert "a sign of a cost, and no test of one. Within the margin: qsdp." in said
    assert "The negative control broken lies above the band (600×)." in said
    assert {arm.verdict for arm in result.arms} == {"baseline", "undecided"}
    alone = conclusion(with_gaps(result, {**gaps, "qsdp": -0.001}))
    assert "w4 ended above" in alone
    assert "No other arm did." in alone
    assert "shared" not in alone


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
    for word in ("p-value", "interval of", "On par", "needs"):
        assert word not in text
    two = judged(tmp_path / "two", 2)
    assert "Noise band" not in verdict_rows(two)[0]
    assert "Noise band" not in dict(page.opening(two))
    assert "What it shows" not in dict(page.opening(two))
    assert conclusion(two) == ""


def test_advice_speaks_of_no_test(tmp_path: Path) -> None:
    said = advise(with_gaps(judged(tmp_path, 1), LOWER))
    assert [one.rule for one in said] == [7, 1, 5]
    assert said[0].text.startswith("No arm is advised in place of zero3: with one seed")
    assert said[1].text == "A control has no answer yet: broken (not run)."
    assert re.fullmatch(r"Worth more seeds.*: qsdp \(\d+.\d%\), w4 \(\d+.\d%\).", said[2].text)
    assert not any("needs" in one.text or "on par" in one.text for one in said)


def test_the_first_seed_of_several_is_one_so_far(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    more = replace(result.study, seeds=[1, 2])
    assert "With one seed an arm so far nothing" in conclusion(judge_study(more, result.runs))


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
    assert "Below" not in line


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
