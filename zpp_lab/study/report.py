"""Writes a study's report: one HTML file that works offline, Markdown, CSV, LaTeX and figures.

Everything is read from the run folders, so a report can be rebuilt at any time,
also while a study runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zpp_lab.config import StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.study import figures, latex, pictures, writeup
from zpp_lab.study.advice import Advice, Speeds, advise
from zpp_lab.study.appendix import Appendix
from zpp_lab.study.certainty import Certainty, certainty
from zpp_lab.study.curves import StudyCurves, study_curves
from zpp_lab.study.effects import Interaction, MainEffect, interactions, main_effects
from zpp_lab.study.figure_rows import telling_arms
from zpp_lab.study.levels import cells_of
from zpp_lab.study.result import read_result
from zpp_lab.study.speeds import Bench, read_bench
from zpp_lab.study.table import console_table, results_csv
from zpp_lab.study.verdict import StudyResult


@dataclass(frozen=True)
class Report:
    """What was written, and the verdict table for a console."""

    html: Path
    markdown: Path
    csv: Path
    latex: Path
    figures: Sequence[Path]  # SVG and PDF
    table: str


@dataclass(frozen=True)
class Findings:
    """All that the page and the text show, read from the runs once."""

    result: StudyResult
    curves: StudyCurves
    effects: Sequence[MainEffect]
    pairs: Sequence[Interaction]
    bench: Bench | None
    speeds: Speeds  # of the bench, by bandwidth and arm; empty without one
    advice: Sequence[Advice]
    certainty: Certainty
    appendix: Appendix


def build_report(root: Path, study: StudyConfig | None = None) -> Report:
    """Write the report of the runs at and below `root` into `root`.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    Raises ValueError when there are no runs or one cannot be read.
    """
    found = find_out(root, study)
    made = figures.make_figures(
        found.result, found.curves, found.effects, found.pairs, found.speeds
    )
    texts: dict[str, Any] = {
        "results.csv": results_csv(found.result),
        "report.md": writeup.markdown(found, made),
        "report.tex": latex.verdict_latex(found.result),
    }
    for name, text in texts.items():
        write_atomic(root / name, text)
    drawn = pictures.write_pictures(root / "figures", made, figures.NAMES)
    write_atomic(root / "report.html", writeup.html(found, made))
    page, text, table, paper = (
        root / name for name in ("report.html", "report.md", "results.csv", "report.tex")
    )
    return Report(page, text, table, paper, drawn, console_table(found.result))


def find_out(root: Path, study: StudyConfig | None = None) -> Findings:
    """Read, judge and summarize the runs at and below `root`; see `build_report`."""
    result = read_result(root, study)
    bench = read_bench(root)
    speeds = bench.by_arm(result) if bench else {}
    cells, confidence = cells_of(result), result.study.confidence
    return Findings(
        result,
        study_curves(result, telling_arms(result)),
        main_effects(cells, confidence),
        interactions(cells, confidence),
        bench,
        speeds,
        advise(result, speeds),
        certainty(result),
        Appendix(result),
    )
