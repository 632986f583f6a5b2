"""`zpp-lab report`, `batch`, `sync` and `dashboard`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zpp_lab.cli.adding import Add
from zpp_lab.config.parser import whole

if TYPE_CHECKING:
    from zpp_lab.config.study import StudyConfig
    from zpp_lab.study.speed.results import Predict

SPEED = "results.csv of `bench step` with speeds of the study's arms; a copy is kept in the study"
MACHINE = "add predicted speeds: a file written by `bench calibrate`, or a name such as h200"
REPORT_PACKAGES = ("altair", "jinja2", "markupsafe", "pandas", "scipy", "statsmodels", "vl_convert")
REPORT = """Into that folder: report.html (one page that works offline), report.md, report.tex,
results.csv and figures/."""


BATCH = """For each sequence: its documents, how many distinct tokens it has, and the share of its
tokens that repeat the text a line before. Where a loss or a gradient's norm jumps in one step, its
text is the first thing to look at.

    zpp-lab batch runs/first/w4/seed1 32,39-41"""


def add_results(add: Add) -> None:
    report = add(
        "report", "write the report of a folder of runs, or of measured speeds", _report, REPORT
    )
    report.add_argument(
        "dir",
        type=Path,
        help="a study's folder, any folder with runs, or a folder written by `bench step`",
    )
    report.add_argument("--speed", type=Path, metavar="FILE", help=SPEED)
    report.add_argument("--machine", metavar="FILE", help=MACHINE)
    batch = add("batch", "show what text a run read in some of its steps", _batch, BATCH)
    batch.add_argument("dir", type=Path, help="a run's folder")
    batch.add_argument("steps", help="steps, such as 32 or 32,39-41")
    batch.add_argument(
        "--characters",
        type=whole(0),
        default=60,
        metavar="N",
        help="characters of each text to print (default: 60; 0: all)",
    )
    sync = add("sync", "send runs that are missing or incomplete in wandb", _sync)
    sync.add_argument(
        "dirs", type=Path, nargs="+", help="run folders, or folders that contain them"
    )
    pages = add("dashboard", "make a study's workspace and report in wandb", _dashboard)
    pages.add_argument("study", nargs="?", help="a study's folder, its name or its YAML file")
    pages.add_argument(
        "--apply",
        type=Path,
        metavar="FILE",
        help="create the pages that this file (dashboard.json) describes",
    )
    pages.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write that file (default: dashboard.json)",
    )
    pages.add_argument("--project", help="wandb's project (default: the runs' own)")
    pages.add_argument("--entity", help="wandb's user or team (default: the runs' own)")


def _report(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.study.speed.results import is_speed_table

    if is_speed_table(args.dir):
        if args.speed:
            raise ValueError(
                f"{args.dir} contains speeds: --speed works only with a study's folder"
            )
        _show_speed(args.dir, _predict(args.machine))
    else:
        _show(args.dir, None, args.speed, _predict(args.machine))
    return 0


def _batch(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.files import text_table
    from zpp_lab.tools.sequences import sequences

    columns = ["step", "rank", "micro-step", "row", "distinct", "repeats", "documents", "text"]
    rows = [
        [
            *map(str, (s.step, s.rank, s.micro, s.row, s.distinct)),
            f"{s.repeats:.0%}",
            ", ".join(s.documents),
            repr(s.text[: args.characters or None])[1:-1],
        ]
        for s in sequences(args.dir, _steps(args.steps))
    ]
    print(text_table(columns, rows, 0))
    return 0


def _steps(text: str) -> list[int]:
    """32,39-41 → [32, 39, 40, 41]"""
    try:
        ends = [[int(end) for end in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        ends = []
    if not ends or any(end[0] > end[-1] for end in ends):
        raise ValueError(f"{text!r}: use steps such as 32 or 32,39-41")
    return sorted({step for end in ends for step in range(end[0], end[-1] + 1)})


def _predict(machine: str | None) -> Predict | None:
    """The predictions of a machine's figures; only these need torch."""
    if machine is None:
        return None
    from zpp_lab.tools.plan.cost.machine import load_machine
    from zpp_lab.tools.plan.cost.show import predictions

    load_machine(machine)  # a mistyped one, before anything is drawn
    return partial(predictions, machine=machine)


def _show_speed(path: Path, predict: Predict | None) -> None:
    """Make the page of measured speeds and print its table."""
    from zpp_lab.study.report.report import build_speed_report

    report = build_speed_report(path, predict)
    print(report.table)
    print(f"\nreport: {report.html}")


def _show(
    root: Path, study: StudyConfig | None, speed: Path | None = None, predict: Predict | None = None
) -> None:
    """Build the report of the runs below `root` and print its table."""
    from zpp_lab.study import build_report  # loads the charting libraries: after the runs

    writing = partial(print, "writing the report …", file=sys.stderr, flush=True)
    report = build_report(root, study, speed, predict, writing)
    print(report.table)
    print(f"\nreport: {report.html}")


def finish(root: Path, study: StudyConfig) -> None:
    """Write the report, here and in wandb. Runs that ended well do not fail for want of a chart."""
    try:
        _show(root, study)
    except ModuleNotFoundError as error:
        advice = report_advice(error, f"`zpp-lab report {root}`")
        print(f"zpp-lab study: no report: {advice}", file=sys.stderr)
        return
    from zpp_lab.study.wandb_pages import publish

    publish.start(root)


def report_advice(error: ModuleNotFoundError, then: str) -> str:
    """Say which package of the report to install. Any other missing module is our fault."""
    if error.name not in REPORT_PACKAGES:
        raise error
    return (
        f"this needs {error.name}, which is not installed; the runs are unaffected. Run `pip "
        f"install 'zpp_lab[report]'` here or on another machine, then {then}"
    )


def _sync(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.runs.wandb.sink import sync_all
    from zpp_lab.study.wandb_pages import publish

    return int(sync_all(args.dirs) + publish.sync(args.dirs) > 0)


def _dashboard(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.study.wandb_pages.command import apply_file, dashboard

    if (args.study is None) == (args.apply is None):
        raise ValueError("give a study (its folder, name or YAML file), or --apply FILE")
    if args.apply is not None:
        return apply_file(args.apply)
    return dashboard(args.study, args.out, args.project, args.entity)
