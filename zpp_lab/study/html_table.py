"""The verdict table as HTML, by great-tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
from great_tables import GT, loc, style

from zpp_lab.study.table import NOTHING, verdict_rows
from zpp_lab.study.verdict import StudyResult

_WHAT = "What it does"
# Text colour and background of a verdict; the word itself carries the meaning.
_COLORS = {
    "baseline": ("#111827", "#e5e7eb"),
    "on par": ("#0b5d43", "#d5f0e6"),
    "better": ("#0b4a86", "#d6e8fa"),
    "worse": ("#8a2b06", "#fbe0d3"),
    "diverged": ("#8a2b06", "#fbe0d3"),
    "failed": ("#8a2b06", "#fbe0d3"),
    "undecided": ("#6b5300", "#fbf1c9"),
    "not run": ("#4b5563", "#f3f4f6"),
}


def verdict_html(result: StudyResult) -> str:
    """The verdict table: one row an arm, the verdict right after what the arm does."""
    frame = pd.DataFrame(verdict_rows(result))
    descriptions = [arm.arm.describe or NOTHING for arm in result.arms]
    frame.insert(1, _WHAT, descriptions)
    base = result.study.baseline
    names: dict[str, Any] = {
        "Gap (nats)": f"Gap, {result.study.confidence:.0%} interval (nats)",
        "Bytes": f"Bytes vs {base}, all links",
        "Bytes between nodes": f"Bytes vs {base}, between nodes",
    }
    table = (
        GT(frame, id="verdicts")
        .cols_label(cases=names)
        .cols_align("right", columns=list(frame.columns[3:]))
        .cols_align("left", columns=list(frame.columns[:3]))
        .tab_options(table_width="100%", table_font_size="14px", data_row_padding="6px")
        .tab_style(style.text(weight="600"), loc.body(columns="Arm"))
    )
    for row, arm in enumerate(result.arms):
        text, fill = _COLORS[arm.verdict]
        look = [style.fill(fill), style.text(color=text, weight="600")]
        table = table.tab_style(look, loc.body(columns="Verdict", rows=[row]))
    return table.as_raw_html()
