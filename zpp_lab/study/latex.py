"""The verdict table as LaTeX, for a paper: \\input it where booktabs is loaded."""

from __future__ import annotations

import pandas as pd

from zpp_lab.study.html_table import verdict_table
from zpp_lab.study.table import margin_line
from zpp_lab.study.verdict import StudyResult

_UNICODE = {"−": "$-$", "±": "$\\pm$", "–": "--", "×": "$\\times$", "Σ": "$\\Sigma$", "≤": "$\\le$"}
_UNICODE |= {"∞": "$\\infty$"}


def verdict_latex(result: StudyResult) -> str:
    """A table environment with caption and label, by pandas; needs the package booktabs."""
    table = verdict_table(result)
    rows = [[_escape(cell) for cell in line.cells] for line in table.lines]
    frame = pd.DataFrame(rows, columns=[_escape(name) for name in table.columns])
    align = "".join("r" if i in table.numbers else "l" for i in range(len(table.columns)))
    return frame.style.hide(axis="index").to_latex(
        hrules=True,
        column_format=align,
        caption=_escape(f"{result.study.question} {margin_line(result)}"),
        label=f"tab:{result.study.name}",
        position="tb",
        position_float="centering",
    )


def _escape(text: str) -> str:
    """LaTeX's special characters made plain, and the few signs that tables have in math."""
    special = {c: f"\\{c}" for c in "&%$#_{}"}
    special |= {"~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\\": "\\textbackslash{}"}
    special |= {"<": "$<$", ">": "$>$", "|": "$|$"}
    return "".join((special | _UNICODE).get(c, c) for c in text)
