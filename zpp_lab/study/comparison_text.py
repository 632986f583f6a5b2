"""A comparison of studies as text for a console, as CSV, Markdown or a plain HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from zpp_lab.files import write_atomic
from zpp_lab.study.compare import Comparison, columns, difference_rows, rows
from zpp_lab.study.table import markdown_table
from zpp_lab.text import text_table

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem;max-width:90rem}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "th,td{border-bottom:1px solid #ccc;padding:.3rem .7rem;text-align:left}"
)


def write_comparison(found: Comparison, out: Path) -> None:
    """Write `out` as its ending says: .csv (the arms only), .md or .html; else ValueError."""
    makers = {".csv": _csv, ".md": _markdown, ".html": _html}
    if out.suffix not in makers:
        raise ValueError(f"{out}: give a file that ends with {', '.join(makers)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, makers[out.suffix](found))


def console(found: Comparison) -> str:
    """Both tables for a terminal, with what they mean."""
    parts = [_table(columns(found), rows(found)), _meaning(found)]
    if difference_rows(found):
        parts += ["What else differs:", _table(_difference_columns(found), difference_rows(found))]
    return "\n\n".join(parts)


def _meaning(found: Comparison) -> str:
    return (
        "Gap: held-out loss minus that of the study's own baseline with the same seed, nats. "
        f"Shift: gap minus that of the first study that has the arm, with Welch's "
        f"{found.confidence:.0%} interval; * where it leaves out 0."
    )


def _difference_columns(found: Comparison) -> list[str]:
    return ["Setting", *found.names]


def _csv(found: Comparison) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns(found), *rows(found)])
    return text.getvalue()


def _markdown(found: Comparison) -> str:
    parts = ["# " + " against ".join(found.names), markdown_table(columns(found), rows(found))]
    parts.append(_meaning(found))
    if difference_rows(found):
        table = markdown_table(_difference_columns(found), difference_rows(found))
        parts += ["## What else differs", table]
    return "\n\n".join(parts) + "\n"


def _html(found: Comparison) -> str:
    title = escape(" against ".join(found.names))
    parts = [f"<h1>{title}</h1>", _html_table("Arms", columns(found), rows(found))]
    parts.append(f"<p>{escape(_meaning(found))}</p>")
    if difference_rows(found):
        table = _html_table("What else differs", _difference_columns(found), difference_rows(found))
        parts.append(table)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>'
        f"{title}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _html_table(caption: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(line[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in line[1:])
        + "</tr>"
        for line in lines
    )
    parts = [f"<caption>{escape(caption)}</caption>", f"<thead><tr>{head}</tr></thead>"]
    return f"<table>{''.join(parts)}<tbody>{body}</tbody></table>"


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return text_table(names, lines, left=len(names))
