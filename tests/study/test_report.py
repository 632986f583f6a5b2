from __future__ import annotations

import csv
import json
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
import vl_convert

from tests.study.fake_runs import ARMS, fake_study, write_failure, write_run, write_study_runs
from zpp_lab.config import StudyConfig
from zpp_lab.study.curves import POINTS, smooth, study_curves, thin
from zpp_lab.study.figures import make_figures
from zpp_lab.study.labels import place
from zpp_lab.study.report import Report, build_report, read_result
from zpp_lab.study.runs import write_study
from zpp_lab.study.style import GapAxis, Style
from zpp_lab.study.table import console_table, percent, results_csv

FIGURES = {"gap", "loss", "gap_curves", "gap_vs_bytes", "telemetry"}


@pytest.fixture(scope="module")
def study() -> StudyConfig:
    return fake_study()


@pytest.fixture(scope="module")
def report(study: StudyConfig, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of 9 arms with 3 seeds of 300 steps; the study comes from study.yaml."""
    root = tmp_path_factory.mktemp("runs")
    write_study_runs(root, study)
    write_study(root, study)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build_report(root)


def test_page_is_one_file_that_asks_for_nothing(report: Report) -> None:
    html = report.html.read_text()
    assert len(html) < 6e6
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(""", markup)
    assert "<script" not in markup  # each one is closed where it should be
    names = re.findall(r'<script type="application/json" id="spec-(\w+)">', html)
    assert set(names) == FIGURES
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html):
        assert json.loads(text)["datasets"]


def test_page_opens_with_question_rule_and_verdicts(report: Report, study: StudyConfig) -> None:
    html = report.html.read_text()
    order = [study.question, "two one-sided paired t tests", 'id="verdicts"', 'id="chart-gap"']
    places = [html.index(text) for text in order]
    assert places == sorted(places)
    for text in (
        "0123456789abcdef",
        "5f1a5f1a",
        "Some CPU",
        "recipe.weights.bits",
        "zpp-lab train",
    ):
        assert text in html


def test_markdown_has_the_same_verdicts(report: Report) -> None:
    text = report.markdown.read_text()
    assert "| broken | negative control: 2 bits everywhere | worse |" in text
    assert "![Held-out loss gap](figures/gap.svg)" in text
    assert "two one-sided paired t tests" in text


def test_figures_are_svg(report: Report) -> None:
    assert {path.stem for path in report.figures} == FIGURES
    for path in report.figures:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_csv_is_tidy_and_rebuilt_to_the_byte(report: Report) -> None:
    root = report.csv.parent
    assert results_csv(read_result(root)) == report.csv.read_text()
    rows = list(csv.DictReader(report.csv.open()))
    assert [(row["arm"], row["seed"]) for row in rows[:4]] == [
        ("zero3", "1"),
        ("zero3", "2"),
        ("zero3", "3"),
        ("zero3_reordered", "1"),
    ]
    assert len(rows) == 27
    base, row = rows[0], next(r for r in rows if r["arm"] == "w4")
    assert float(row["gap"]) == float(row["heldout_loss"]) - float(base["heldout_loss"])
    summary = json.loads((root / "w4" / "seed1" / "summary.json").read_text())
    sent = summary["bytes"]["weights_forward"]["inter"]
    assert row["bytes_weights_forward_inter"] == str(sent)


def test_console_table_lines_up(report: Report) -> None:
    lines = report.table.splitlines()
    assert lines[2].split()[:2] == ["zero3", "baseline"]
    assert lines[2].endswith("3 of 3")
    broken = next(line for line in lines if line.startswith("broken"))
    assert " worse " in broken
    assert "7.0%" in broken
    assert "±0.0058 nats" in lines[-1]


def test_report_of_failed_and_missing_runs(tmp_path: Path) -> None:
    zero3, w4, w2 = ARMS[0], ARMS[5], ARMS[6]
    for seed in (1, 2):
        write_run(tmp_path / "zero3" / f"seed{seed}", zero3, seed, 50, "fake")
    write_run(tmp_path / "w4" / "seed1", w4, 1, 50, "fake")
    write_failure(tmp_path / "w4" / "seed2", w4, 2, "out_of_memory", "CUDA out of memory")
    write_failure(tmp_path / "w2" / "seed1", w2, 1, "diverged", "loss <b>is</b> NaN")
    report = build_report(tmp_path, fake_study((zero3, w4, w2, ARMS[7]), seeds=3))
    html = report.html.read_text()
    assert "w4: seed 2 ran out of memory (CUDA out of memory)." in html
    assert "loss &lt;b&gt;is&lt;/b&gt; NaN" in html
    assert "diverged (1 of 3 seeds)" in report.table
    assert "needs at least 2 seeds" in report.table
    assert "not run" in report.table
    outcomes = [row["outcome"] for row in csv.DictReader(report.csv.open())]
    assert outcomes == ["finished", "finished", "finished", "out_of_memory", "diverged"]
    assert "nan" not in report.csv.read_text().lower()


def test_figures_follow_the_data_that_there_are(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ARMS[0], 1, 60)
    result = read_result(tmp_path)
    assert set(make_figures(result, study_curves(result))) == {"loss"}
    assert "baseline" in console_table(result)


@pytest.mark.parametrize("arms", [14, 40])
def test_many_arms_stay_apart(arms: int) -> None:
    names = [f"arm{i}" for i in range(arms)]
    style = Style(names, "arm0")
    looks = {(style.colors[name], str(style.dashes[name])) for name in names}
    assert len(looks) == min(arms, 37)


def test_curves_are_thinned_and_bands_hold_the_mean(report: Report, study: StudyConfig) -> None:
    curves = study_curves(read_result(report.html.parent))
    training = [r for r in curves.loss if r["arm"] == "w4" and r["series"] == "training"]
    assert len(training) == POINTS
    assert (training[0]["step"], training[-1]["step"]) == (1, 300)
    assert all(row["low"] <= row["mean"] <= row["high"] for row in [*curves.loss, *curves.gap])
    assert {row["arm"] for row in curves.gap} == {arm.name for arm in study.arms} - {"zero3"}


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    import numpy as np

    assert smooth(np.full(50, 2.5), 10) == pytest.approx(np.full(50, 2.5))
    assert smooth(np.array([4.0, 0.0]), 10)[0] == 4.0
    assert smooth(np.array([4.0, 1.0]), 1) == pytest.approx([4.0, 1.0])
    assert not np.isfinite(smooth(np.array([4.0, np.nan, 4.0]), 3)[1:]).any()


def test_thin_keeps_the_ends() -> None:
    assert thin([3, 1, 2]) == [1, 2, 3]
    assert thin(range(1000), 5) == [0, 250, 500, 749, 999]


def test_gap_axis_matches_the_scale_that_draws_it() -> None:
    gaps = GapAxis.around(0.006, -0.001, 1.4)
    for value in (-0.01, 0.0, 0.003, 0.5, 1.4):
        assert gaps.value(gaps.place(value)) == pytest.approx(value, abs=1e-12)
    assert gaps.place(gaps.low) == 0
    assert gaps.place(gaps.high) == 1
    values = gaps.axis.to_dict()["values"]
    assert {0, -0.006, 0.006, 1.0} <= set(values)


def test_labels_do_not_overlap() -> None:
    points = [(100.0, 100.0), (102.0, 101.0), (104.0, 99.0), (360.0, 100.0)]
    places = place(points, ["first", "second", "third", "at the edge"], 370, 340)
    for i, (x, y) in enumerate(places):
        assert 0 <= x <= 370
        for other_x, other_y in places[:i]:
            assert abs(y - other_y) >= 12 or abs(x - other_x) >= 30


def test_percents() -> None:
    assert [percent(v) for v in (None, 0.126, 1.0, 1.25)] == ["–", "12.6%", "100%", "125%"]


def test_vega_lite_version_is_known_to_the_converter() -> None:
    from zpp_lab.study.report import _vegalite_version

    assert f"v{_vegalite_version()}" in vl_convert.get_vegalite_versions() or (
        _vegalite_version() in vl_convert.get_vegalite_versions()
    )
