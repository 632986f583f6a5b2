from __future__ import annotations

import csv
import json
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.study.fake_runs import ARMS, fake_study, write_failure, write_run, write_study_runs
from tests.study.fake_sweep import grid, write_sweep
from zpp_lab.config.study import Role, StudyConfig
from zpp_lab.runs.reader import write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.appendix import Appendix, facts, scope
from zpp_lab.study.report.contents import find_out, study_document
from zpp_lab.study.report.figures.curves import study_curves
from zpp_lab.study.report.figures.draw import make_figures
from zpp_lab.study.report.figures.training import BANDED
from zpp_lab.study.report.render import html
from zpp_lab.study.report.report import Report, build_report
from zpp_lab.study.report.style import LOOKS, GapAxis
from zpp_lab.study.report.table import console_table, results_csv, verdict_rows

FIGURES = {"gap", "loss", "gap_curves", "gap_steps", "gap_vs_bytes", "main_effects", "telemetry"}
FIGURES |= {f"telemetry_{measure}" for measure in ("bias", "cosine", "saturated", "zeroed")}


ROLES: dict[str, Role] = {
    "zero3": "baseline",
    "zero3_reordered": "order_control",
    "broken": "negative_control",
}


@pytest.fixture(scope="module")
def study() -> StudyConfig:
    study = fake_study()
    return replace(
        study, arms=[replace(arm, role=ROLES.get(arm.name, "arm")) for arm in study.arms]
    )


@pytest.fixture(scope="module")
def report(study: StudyConfig, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of 9 arms with 3 seeds of 300 steps; the study comes from study.yaml."""
    root = tmp_path_factory.mktemp("runs")
    write_study_runs(root, study)
    write_study(root, study)
    for seed, url in ((1, "https://wandb.ai/me/run"), (2, "javascript:alert()")):
        (root / "w4" / f"seed{seed}" / "wandb.json").write_text(json.dumps({"url": url}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build_report(root)


def without_links(markup: str) -> str:
    """A page without what readers may click on, which asks for nothing by itself."""
    return re.sub(r'<a href="(?!javascript)[^"]*"', "<a", markup)


def test_page_is_one_file_that_asks_for_nothing(report: Report) -> None:
    html = report.html.read_text()
    assert len(html.encode()) < 3e6
    assert "default-src 'none'" in html
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    links = set(re.findall(r'<a href="([^"]*)"', markup))
    assert {"#answer", "w4/seed1/", "https://wandb.ai/me/run"} <= links
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(""", without_links(markup))
    assert "<script" not in markup  # each one is closed where it should be
    names = re.findall(r'<script type="application/json" id="spec-(\w+)">', html)
    assert set(names) == FIGURES
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html):
        spec = json.loads(text)
        assert spec["datasets"]
        assert {"side", "legend"} <= set(spec["usermeta"])


def test_tables_speak_to_a_screen_reader(report: Report) -> None:
    html = re.sub(r"<script.*?</script>", "", report.html.read_text(), flags=re.DOTALL)
    tables = re.findall(r"<table.*?</table>", html, flags=re.DOTALL)
    assert len(tables) >= 6
    for table in tables:
        assert "<caption" in table
        heads = re.findall(r"<th\b[^>]*>", table)
        assert all("scope=" in head for head in heads)
        rows = re.findall(r"<tbody>(.*)</tbody>", table, flags=re.DOTALL)[0].count("<tr")
        assert rows == table.count('<th scope="row">')
    assert '<label for="filter">' in html


def test_latex_table_is_whole(report: Report) -> None:
    text = report.latex.read_text()
    assert text.count("\\begin{") == text.count("\\end{") == 2
    body = text[text.index("\\midrule") : text.index("\\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith("\\\\")]
    assert len(rows) == 9
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {9}
    assert "zero3\\_reordered" in body
    assert not re.search(r"(?<!\\)[%_#]", body)
    assert text.isascii()


def test_figures_are_svg_and_pdf(report: Report) -> None:
    assert {path.stem for path in report.figures} == FIGURES
    for path in report.figures:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"%PDF-")
    assert len(report.figures) == 2 * len(FIGURES)


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


def test_report_of_failed_and_missing_runs(tmp_path: Path) -> None:
    zero3, w4, w2 = ARMS[0], ARMS[5], ARMS[6]
    for seed in (1, 2):
        write_run(tmp_path / "zero3" / f"seed{seed}", zero3, seed, 50, "fake")
    write_run(tmp_path / "w4" / "seed1", w4, 1, 50, "fake")
    write_failure(tmp_path / "w4" / "seed2", w4, 2, "out_of_memory", "CUDA out of memory")
    write_failure(tmp_path / "w2" / "seed1", w2, 1, "diverged", "loss <b>is</b> NaN")
    report = build_report(tmp_path, fake_study((zero3, w4, w2, ARMS[7]), seeds=3))
    html = report.html.read_text()
    assert "w4: seed 2 ran out of memory after step 100 of 300 (CUDA out of memory)." in html
    assert "loss &lt;b&gt;is&lt;/b&gt; NaN" in html
    assert "diverged (1 of 3 seeds)" in report.table
    assert "undecided (one seed)" in report.table
    assert "not run (never started)" in report.table
    outcomes = [row["outcome"] for row in csv.DictReader(report.csv.open())]
    assert outcomes == ["finished", "finished", "finished", "out_of_memory", "diverged"]
    assert "nan" not in report.csv.read_text().lower()


def test_figures_follow_the_data_that_there_are(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ARMS[0], 1, 60)
    result = read_result(tmp_path)
    assert [figure.name for figure in make_figures(result, study_curves(result))] == ["loss"]
    assert "baseline" in console_table(result)


def test_figures_of_many_arms_have_no_bands(study: StudyConfig, report: Report) -> None:
    spec = _spec(report, "gap_steps")
    rows = spec["datasets"]["gaps"]
    assert {row["arm"] for row in rows} == {arm.name for arm in study.arms} - {"zero3"}
    banded = any(row["low"] < row["high"] for row in rows)
    assert banded == (len(study.arms) - 1 <= BANDED)


def test_the_baselines_settings_are_those_that_are_not_the_defaults(report: Report) -> None:
    result = read_result(report.csv.parent)
    lines = Appendix(result).baseline_settings()
    assert 0 < len(lines) < 20
    assert not [line for line in lines if line.endswith("=null")]


def test_the_gap_figure_has_bytes_beside_gaps_in_the_tables_order(report: Report) -> None:
    rows = {row["arm"]: row for row in _spec(report, "gap")["datasets"]["arms"]}
    ranked = [arm for arm in read_result(report.csv.parent).ranked if arm.gap is not None]
    assert [arm.name for arm in ranked if arm.verdict != "baseline"] == [
        line.split()[0] for line in report.table.split("\n\n")[0].splitlines()[3:]
    ]
    assert all(rows[arm.name]["sent"].endswith("%") for arm in ranked if arm.name in rows)


def _spec(report: Report, name: str) -> dict[str, Any]:
    found = re.search(rf'id="spec-{name}">(.*?)</script>', report.html.read_text())
    assert found is not None
    spec: dict[str, Any] = json.loads(found[1])
    return spec


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("length", [210, 340, 520])
@pytest.mark.parametrize("margin", [0.0045, 0.0061, 0.012, 0.0601])
@pytest.mark.parametrize("ends", [(-0.001, 0.02), (-0.1, 0.05), (-2.0, 3.0), (0.0, 30.0)])
def test_tick_labels_do_not_overlap(
    ends: tuple[float, float], margin: float, length: int, across: bool
) -> None:
    gaps = GapAxis.around(margin, *ends)
    ticks = gaps.ticks(length, across)
    assert 0.0 in ticks
    assert across or {-margin, margin} <= set(ticks)
    for one, other in pairwise(ticks):
        apart = (gaps.place(other) - gaps.place(one)) * length
        labels = [f"{value:+.2g}" for value in (one, other)]
        assert apart >= (6.3 * sum(map(len, labels)) / 2 if across else 14)


def test_commands_of_plain_runs_make_the_same_config(tmp_path: Path) -> None:
    from zpp_lab.config.compose import compose
    from zpp_lab.study.run.plan import differences

    write_run(tmp_path / "a", ARMS[0], 2, 60)
    write_run(tmp_path / "b", ARMS[2], 2, 60)
    result = read_result(tmp_path)
    appendix = Appendix(result)
    for arm in result.arms:
        overrides = appendix.overrides(arm)
        assert overrides
        assert not differences(compose(overrides), arm.runs[2].config)


def test_facts_name_tensor_parts_and_stages(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ARMS[0], 2, 60)
    path = tmp_path / "a" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"cluster": summary["cluster"] | {"tp": 2}}))
    result = read_result(tmp_path)
    assert "tp=2" in dict(facts(result))["Cluster"]
    assert "tp=2" in scope(result)
    assert "pp=" not in scope(result)


@pytest.mark.slow
def test_two_hundred_runs_make_a_page_below_3_mb(tmp_path: Path) -> None:
    study = write_sweep(tmp_path, grid()[:22], seeds=8)
    assert len(study.arms) * len(study.seeds) == 200
    found = find_out(tmp_path, read_result(tmp_path))
    figures = make_figures(found.result, found.curves, found.effects, found.pairs)
    assert {"main_effects", "interactions"} <= {figure.name for figure in figures}
    assert len(html(study_document(found, figures)).encode()) < 3e6
    told = {r["arm"] for r in found.curves.telemetry if r["step"] > 0}
    assert len(told) <= LOOKS
    assert {r["arm"] for r in found.curves.telemetry} > told
    block = next(e for e in found.effects if e.factor == "recipe.weights.block_size")
    means = [estimate.mean for estimate in block.levels.values()]
    assert means == sorted(means)


def test_activations_are_a_kind_of_their_own(tmp_path: Path) -> None:
    """Beside weights and gradients where a run has tensor parts, with columns of their wires."""
    study = fake_study((ARMS[0], ARMS[5]))
    write_study_runs(tmp_path, study, steps=20)
    for seed in study.seeds:
        file = tmp_path / "w4" / f"seed{seed}" / "summary.json"
        summary = json.loads(file.read_text())
        summary["quantized_share"] |= {"acts_forward": 0.999, "acts_backward": 0.5, "tp_raw": 0.0}
        summary["bytes"] |= {"acts_forward": {"intra": 7, "inter": 0}}
        file.write_text(json.dumps(summary))
    result = read_result(tmp_path, study)
    (column,) = (name for name in verdict_rows(result)[0] if name.startswith("Quantized"))
    assert column.endswith("activations)")
    base, w4 = (row[column].split(", ")[-1] for row in verdict_rows(result))
    assert (base, w4) == ("–", "99.9/50%")
    rows = list(csv.DictReader(results_csv(result).splitlines()))
    assert [row["bytes_acts_forward_intra"] for row in rows[-len(study.seeds) :]] == ["7"] * len(
        study.seeds
    )
