"""The page of a folder of `zpp-lab bench step`: HTML that works offline, Markdown, CSV, figures.

Everything comes from the folder's results.csv, so the page can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zpp_lab.files import text_table, write_atomic
from zpp_lab.study.report import page, writeup
from zpp_lab.study.report.figures.draw import Figure, write_pictures
from zpp_lab.study.report.html_table import Table
from zpp_lab.study.report.speed.figures import SPEED_NAMES, make_speed_figures
from zpp_lab.study.report.speed.results import BASE, Measured, Predict, read_speeds, speed_file
from zpp_lab.study.report.speed.tables import (
    SpeedFindings,
    break_even_csv,
    break_even_table,
    find_speeds,
    headlines,
    notes,
    speed_csv,
    speed_table,
)
from zpp_lab.study.report.style import Style, arm_looks

TITLE = "Speed on links between nodes"


@dataclass(frozen=True)
class SpeedReport:
    """What was written, and the break-even table for a console."""

    html: Path
    markdown: Path
    csv: Path
    break_even: Path
    figures: Sequence[Path]
    table: str


def build_speed_report(path: Path, predict: Predict | None = None) -> SpeedReport:
    """Write the page of `path`, a table of speeds or its folder, beside the table.

    predict: what the cost model says of measured arms (see `speed_rows.Predict`).
    ValueError where the table is absent or at fault.
    """
    file = speed_file(path)
    root, found = file.parent, find_speeds(read_speeds(file), predict)
    made = make_speed_figures(found, Style(arm_looks(found.arms, BASE), BASE))
    tables = {"breaks": break_even_table(found), "speeds": speed_table(found)}
    texts = {
        "speedup.csv": speed_csv(found),
        "break_even.csv": break_even_csv(found),
        "report.md": _markdown(found, made, tables),
    }
    for name, text in texts.items():
        write_atomic(root / name, text)
    drawn = write_pictures(root / "figures", made, SPEED_NAMES)
    write_atomic(root / "report.html", _html(found, made, tables))
    names = ("report.html", "report.md", "speedup.csv", "break_even.csv")
    html, markdown, table, breaks = (root / name for name in names)
    return SpeedReport(html, markdown, table, breaks, drawn, _console(tables["speeds"]))


def _html(found: SpeedFindings, figures: Sequence[Figure], tables: dict[str, Table]) -> str:
    return writeup.render(
        "speed.html.j2",
        figures,
        title=TITLE,
        opening=opening(found.measured),
        headlines=headlines(found),
        notes=notes(found),
        tables=tables,
        method=page.speed_method(),
    )


def _markdown(found: SpeedFindings, figures: Sequence[Figure], tables: dict[str, Table]) -> str:
    told, left = headlines(found), notes(found)
    parts = [
        f"# {TITLE}",
        "\n".join(f"- **{what}**: {text}" for what, text in opening(found.measured)),
        *(["## What is fastest", "\n".join(f"- {line}" for line in told)] if told else []),
        *(["## Notes", "\n".join(f"- {line}" for line in left)] if left else []),
        *(["## Figures", *map(writeup.figure_markdown, figures)] if figures else []),
        *(
            ["## Break-even", writeup.table_markdown(tables["breaks"])]
            if tables["breaks"].lines
            else []
        ),
        "## Speeds",
        writeup.table_markdown(tables["speeds"]),
        "## How it is worked out",
        "\n\n".join(page.speed_method()),
    ]
    return "\n\n".join(parts) + "\n"


def opening(measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """(what, sentence) for the page's first lines."""
    machines = dict.fromkeys(m.machine for m in measured if m.machine)
    batches = dict.fromkeys(
        f"{m.setting.batch_size} × {m.setting.seq_len} tokens"
        for m in measured
        if m.setting.seq_len
    )
    return [
        ("Machine", "; ".join(machines) or "not said in the table"),
        ("Models", ", ".join(dict.fromkeys(m.setting.model for m in measured)) or "not said"),
        ("Batch of a GPU", "; ".join(batches) or "not said in the table"),
        ("Compared with", "plain FSDP2 (arm fsdp2): its defaults, nothing of this package around."),
    ]


def _console(table: Table) -> str:
    cells: list[Any] = [line.cells for line in table.lines]
    return text_table(table.columns, cells, left=3)
