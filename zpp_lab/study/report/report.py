"""Writes reports: one HTML file that works offline, Markdown, CSV, figures, and LaTeX of a study.

All is read from the run folders, or from the bench's results.csv, so a report can be made again at
any time, also while a study runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zpp_lab.config.study import StudyConfig
from zpp_lab.files import text_table, write_atomic
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.contents import draw, find_out, study_document, verdict_table
from zpp_lab.study.report.figures.draw import NAMES, write_pictures
from zpp_lab.study.report.render import html, latex, markdown
from zpp_lab.study.report.sections import Document
from zpp_lab.study.report.speed.contents import (
    break_even_csv,
    find_speeds,
    speed_csv,
    speed_document,
    speed_table,
)
from zpp_lab.study.report.speed.figures import SPEED_NAMES, highlighted, make_speed_figures
from zpp_lab.study.report.style import Style, arm_looks
from zpp_lab.study.report.table import console_table, margin_line, results_csv
from zpp_lab.study.report.trials import NAME as TRIALS
from zpp_lab.study.report.trials import find_trials, trials_console, trials_document, trials_table
from zpp_lab.study.speed.results import BASE, Predict, copy_table, read_speeds, speed_file
from zpp_lab.study.speed.speeds import COPY
from zpp_lab.study.words import in_unit


@dataclass(frozen=True)
class Report:
    """What was written, and the verdict table for a console."""

    html: Path
    markdown: Path
    csv: Path
    latex: Path
    figures: Sequence[Path]  # SVG and PDF
    table: str


_PAGE_ONLY = ("Floor (s)", "Of the floor", "Host waits (s)")  # not in a terminal


@dataclass(frozen=True)
class SpeedReport:
    """What was written, and the table of speeds for a console."""

    html: Path
    markdown: Path
    csv: Path
    break_even: Path
    figures: Sequence[Path]
    table: str


def build_report(
    root: Path,
    study: StudyConfig | None = None,
    speed: Path | None = None,
    predict: Predict | None = None,
    began: Callable[[], None] | None = None,
) -> Report:
    """Write the report of the runs at and below `root` into `root`.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    speed: measured speeds, a results.csv of `zpp-lab bench step` or its folder; the study keeps a
    copy for later reports. predict: the cost model's predictions.
    began: called when all has been read, before seconds of drawing.
    Raises ValueError when there are no runs or one cannot be read.
    """
    result = read_result(root, study)  # a folder without runs gets no file
    if speed is not None:
        copy_table(speed, root / COPY)
    trials = find_trials(result)
    found = find_out(root, trials.labelled if trials else result, predict)
    if began is not None:
        began()
    if trials:
        document = trials_document(trials, draw(found), root)
        caption, table = " ".join(trials.answer), trials_table(trials, root)
        console = trials_console(trials)
    else:
        document = study_document(found, draw(found))
        caption = f"{result.study.question} {margin_line(result)}"
        table, console = verdict_table(result), console_table(result)
    own_unit = partial(in_unit, result)
    paper_table = own_unit(latex(table, caption, result.study.name))
    texts = {"results.csv": results_csv(result), "report.tex": paper_table}
    drawn = _write(root, document, texts, (*NAMES, *SPEED_NAMES, TRIALS), own_unit)
    page, text = root / "report.html", root / "report.md"
    data, paper = root / "results.csv", root / "report.tex"
    return Report(page, text, data, paper, drawn, own_unit(console))


def build_speed_report(path: Path, predict: Predict | None = None) -> SpeedReport:
    """Write the page of `path`, a table of speeds or its folder, next to the table.

    predict: what the cost model says of measured arms (see `results.Predict`).
    ValueError where the table is absent or at fault.
    """
    file = speed_file(path)
    root, found = file.parent, find_speeds(read_speeds(file), predict)
    style = Style(arm_looks(highlighted(found), BASE), BASE)
    document = speed_document(found, make_speed_figures(found, style))
    texts = {"speedup.csv": speed_csv(found), "break_even.csv": break_even_csv(found)}
    drawn = _write(root, document, texts, SPEED_NAMES)
    page, text = root / "report.html", root / "report.md"
    data, breaks = root / "speedup.csv", root / "break_even.csv"
    every = speed_table(found)
    shown = [i for i, name in enumerate(every.names) if name not in _PAGE_ONLY]
    rows = [[row.texts[i] for i in shown] for row in every.rows]
    console = text_table([every.names[i] for i in shown], rows, left=3)
    return SpeedReport(page, text, data, breaks, drawn, console)


def _write(
    root: Path,
    document: Document,
    texts: Mapping[str, str],
    known: Sequence[str],
    unit: Callable[[str], str] = str,
) -> list[Path]:
    """Write the files, remove old pictures of `known` names; returns the pictures. unit: gives
    a text the study's unit."""
    for name, text in {**texts, "report.md": unit(markdown(document))}.items():
        write_atomic(root / name, text)
    drawn = write_pictures(root / "figures", document.figures, known, unit)
    write_atomic(root / "report.html", unit(html(document)))
    return drawn
