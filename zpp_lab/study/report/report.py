"""Writes a study's report: one HTML file that works offline, Markdown, CSV, LaTeX and figures.

Everything is read from the run folders, so a report can be rebuilt at any time,
also while a study runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zpp_lab.config.study import StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.study.judge.advice import Advice, advise
from zpp_lab.study.judge.certainty import Certainty, certainty
from zpp_lab.study.judge.effects import (
    Interaction,
    MainEffect,
    cells_of,
    interactions,
    main_effects,
)
from zpp_lab.study.judge.noise import one_seed
from zpp_lab.study.judge.verdict import StudyResult, read_result
from zpp_lab.study.report import writeup
from zpp_lab.study.report import writeup as latex
from zpp_lab.study.report.curves import StudyCurves, study_curves
from zpp_lab.study.report.figures.draw import NAMES, Figure, make_figures, write_pictures
from zpp_lab.study.report.figures.gap import telling_arms
from zpp_lab.study.report.page import Appendix
from zpp_lab.study.report.speed.figures import SPEED_NAMES, make_speed_figures
from zpp_lab.study.report.speed.results import BASE, Predict, copy_table
from zpp_lab.study.report.speed.speeds import COPY, StudySpeeds, study_speeds
from zpp_lab.study.report.speed.tables import SpeedFindings, find_speeds
from zpp_lab.study.report.style import Look, Style, arm_looks, study_looks
from zpp_lab.study.report.table import console_table, results_csv


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
    speeds: StudySpeeds | None  # of the study's arms, None where no speed.csv lies in its folder
    speed: SpeedFindings | None  # of all measured arms
    advice: Sequence[Advice]
    certainty: Certainty
    appendix: Appendix


def build_report(
    root: Path,
    study: StudyConfig | None = None,
    speed: Path | None = None,
    predict: Predict | None = None,
    began: Callable[[], None] | None = None,
) -> Report:
    """Write the report of the runs at and below `root` into `root`.

    began: called when all has been read, before seconds of drawing.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    speed: measured speeds, a results.csv of `zpp-lab bench step` or its folder; the study keeps a
    copy for later reports. predict: what the cost model says beside them.
    Raises ValueError when there are no runs or one cannot be read.
    """
    result = read_result(root, study)  # a folder without runs gets no file
    if speed is not None:
        copy_table(speed, root / COPY)
    found = find_out(root, result, predict)
    if began is not None:
        began()
    made = draw(found)
    texts: dict[str, Any] = {
        "results.csv": results_csv(found.result),
        "report.md": writeup.markdown(found, made),
        "report.tex": latex.verdict_latex(found.result),
    }
    for name, text in texts.items():
        write_atomic(root / name, text)
    drawn = write_pictures(root / "figures", made, (*NAMES, *SPEED_NAMES))
    write_atomic(root / "report.html", writeup.html(found, made))
    page, text, table, paper = (
        root / name for name in ("report.html", "report.md", "results.csv", "report.tex")
    )
    return Report(page, text, table, paper, drawn, console_table(found.result))


def find_out(root: Path, result: StudyResult, predict: Predict | None = None) -> Findings:
    """What there is to say of `result`, the judged runs at and below `root`; see `build_report`."""
    speeds = study_speeds(root, result)
    cells = [] if one_seed(result) else cells_of(result)  # one seed: effects without intervals
    confidence = result.study.confidence
    return Findings(
        result,
        study_curves(result, telling_arms(result)),
        main_effects(cells, confidence),
        interactions(cells, confidence),
        speeds,
        find_speeds(speeds.measured, predict) if speeds else None,
        advise(result, speeds.by_place if speeds else None),
        certainty(result),
        Appendix(result),
    )


def draw(found: Findings) -> list[Figure]:
    """All figures; those of speed come after the gap's against speed or bytes."""
    by_place = found.speeds.by_place if found.speeds else {}
    made = make_figures(found.result, found.curves, found.effects, found.pairs, by_place)
    if found.speed is None:
        return made
    names = [figure.name for figure in made]
    place = max((names.index(n) for n in _BEFORE_SPEED if n in names), default=-1) + 1
    return [*made[:place], *make_speed_figures(found.speed, _speed_style(found)), *made[place:]]


_BEFORE_SPEED = ("gap", "gap_vs_bytes", "gap_vs_speed")


def _speed_style(found: Findings) -> Style:
    """A measured arm has the colour of the study's arm that it is the speed of, where there is
    one; the others take colours that are left. Plain FSDP2, the base, is black."""
    assert found.speed is not None
    assert found.speeds is not None
    own = study_looks(found.result.study, telling_arms(found.result))
    taken: dict[str, Look] = {}
    for arm, look in own.items():
        for name in found.speeds.matches.get(arm, [])[:1]:
            if name != BASE and arm != found.result.study.baseline:
                taken.setdefault(name, look)
    return Style(arm_looks([*taken, *found.speed.arms], BASE, taken=taken), BASE)
