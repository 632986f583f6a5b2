"""A report's sections as one HTML page that works offline, as Markdown, and tables as LaTeX."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from zpp_lab.study.report.sections import (
    Badge,
    Column,
    Content,
    Document,
    Figure,
    Fold,
    Links,
    Table,
    Terms,
    Text,
)

_TEMPLATES = Path(__file__).parent / "templates"
_SIGNS = {c: f"\\{c}" for c in "&%$#_{}"}  # what LaTeX writes otherwise
_SIGNS |= {"−": "$-$", "±": "$\\pm$", "–": "--", "×": "$\\times$", "Σ": "$\\Sigma$", "≤": "$\\le$"}
_SIGNS |= {"∞": "$\\infty$", "<": "$<$", ">": "$>$", "|": "$|$", "\\": "\\textbackslash{}"}
_SIGNS |= {"~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "≠": "$\\ne$"}


def html(document: Document) -> str:
    """Return the whole page, with its style, scripts, figures and data inside."""
    from zpp_lab.study.report.figures.draw import vega_bundle  # charts: a second to import

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "code": _code}
    environment.tests |= {
        kind.__name__.lower(): lambda item, kind=kind: isinstance(item, kind)
        for kind in (Text, Terms, Table, Figure, Fold, Badge, Links)
    }
    figures = document.figures
    texts = {f.name: json.dumps(f.spec, separators=(",", ":")) for f in figures}
    specs = {name: text.replace("<", "\\u003c") for name, text in texts.items()}  # no </script>
    return environment.get_template("page.html.j2").render(
        document=document,
        specs=specs,
        bundle=vega_bundle() if figures else "",
        style=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "report.js").read_text(encoding="utf-8"),
    )


def markdown(document: Document) -> str:
    """Return figures are links to their SVG files in the folder figures."""
    parts = [f"# {document.title}", f"**{document.question}**"]
    for section in document.sections:
        if section and not section.page_only:
            parts += [f"## {section.title}"] if section.title else []
            parts += [part for item in section.content if item for part in _in_markdown(item)]
    return "\n\n".join(parts) + "\n"


def _in_markdown(item: Content) -> list[str]:
    match item:
        case Text(lines, "paragraphs"):
            return list(lines)
        case Text(lines, "list"):
            return ["\n".join(f"- {line}" for line in lines)]
        case Text(lines, "numbered"):
            return ["\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))]
        case Text(lines):
            return ["```\n{}\n```".format("\n".join(lines))]
        case Terms():
            return ["\n".join(f"- **{what}**: {text}" for what, text in item.pairs)]
        case Table(page_only=True):
            return []
        case Table():
            return [f"*{item.caption}*", table_markdown(item)]
        case Figure():
            picture = f"![{item.title}](figures/{item.name}.svg)"
            return [f"### {item.title}", picture, item.caption]
        case Fold():
            shown = [] if item.page_only else item.content
            return [part for one in shown if one for part in _in_markdown(one)]


def table_markdown(table: Table) -> str:
    columns, texts = _for_paper(table)
    rows = [
        [
            "<br>".join(f"`{line}`" for line in t.splitlines()) if c.kind == "code" else t
            for c, t in zip(columns, row, strict=True)
        ]
        for row in texts
    ]
    return markdown_table([column.name for column in columns], rows)


def _for_paper(table: Table) -> tuple[list[Column], list[list[str]]]:
    """A table's columns and texts without links."""
    own = [i for i, column in enumerate(table.columns) if column.kind != "links"]
    return [table.columns[i] for i in own], [[row.texts[i] for i in own] for row in table.rows]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table; `|` in a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def latex(table: Table, caption: str, label: str) -> str:
    """Return a table environment, for a paper: `input` it where the package booktabs is loaded."""
    columns, texts = _for_paper(table)
    align = "".join("r" if column.kind == "number" else "l" for column in columns)
    head, *rows = (
        " & ".join(map(_in_latex, cells)) + " \\\\"
        for cells in ([column.name for column in columns], *texts)
    )
    lines = ["\\begin{table}[tb]", "\\centering", f"\\caption{{{_in_latex(caption)}}}"]
    lines += [f"\\label{{tab:{label}}}", f"\\begin{{tabular}}{{{align}}}", "\\toprule", head]
    lines += ["\\midrule", *rows, "\\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _in_latex(text: str) -> str:
    """LaTeX's special characters made plain, and the few signs that tables have in math."""
    return "".join(_SIGNS.get(c, c) for c in text)


def _breakable(text: Any) -> markupsafe.Markup:
    """A name that a narrow column may break after an underscore or a dot."""
    escaped = markupsafe.escape(text)
    for mark in "_.":
        escaped = escaped.replace(mark, markupsafe.Markup(f"{mark}<wbr>"))
    return escaped


def _code(text: Any) -> markupsafe.Markup:
    """A text's words in backticks as code; a value and its interval stay on one line."""
    text = str(markupsafe.escape(text)).replace(" ± ", "\u00a0±\u00a0").replace("≠ ", "≠\u00a0")
    return markupsafe.Markup(re.sub("`([^`]+)`", r"<code>\1</code>", text))
