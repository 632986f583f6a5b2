"""The report as one HTML page and as Markdown, from what `report.find_out` found.

The verdict table as LaTeX, for a paper: `input` it where booktabs is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe
import pandas as pd

from zpp_lab.study.judge.advice import RULES
from zpp_lab.study.judge.verdict import StudyResult
from zpp_lab.study.report import page
from zpp_lab.study.report.figures.draw import Figure, left_out, vega_bundle
from zpp_lab.study.report.html_table import (
    Table,
    certainty_table,
    commands_table,
    differences_table,
    effects_table,
    facts_table,
    interactions_table,
    runs_table,
    telemetry_table,
    verdict_table,
)
from zpp_lab.study.report.speed.tables import (
    break_even_table,
    headlines,
    match_table,
    notes,
    speed_table,
)
from zpp_lab.study.report.table import margin_line, markdown_table, p_value_line, verdict_markdown

if TYPE_CHECKING:
    from zpp_lab.study.report.report import Findings


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


_TEMPLATES = Path(__file__).parent / "templates"
_FOLDED = "telemetry_"  # figures behind a fold: more of the same


def html(found: Findings, figures: Sequence[Figure]) -> str:
    """The whole page, with its style, scripts and data inside."""
    result = found.result
    return render(
        "report.html.j2",
        figures,
        result=result,
        study=result.study,
        opening=page.opening(result),
        controls_hold=page.controls_hold(result),
        decision=page.decision(result),
        certainty=found.certainty.lines(),
        margin_line=margin_line(result),
        p_value_line=_p_value_line(found),
        advice=found.advice,
        rules=RULES,
        shown=[figure for figure in figures if not figure.name.startswith(_FOLDED)],
        folded=[figure for figure in figures if figure.name.startswith(_FOLDED)],
        left_out=left_out(result, found.curves),
        effect_notes=page.effect_notes(found.effects),
        tables=_tables(found),
        speeds=found.speeds,
        speed_told=headlines(found.speed) if found.speed else [],
        speed_notes=notes(found.speed) if found.speed else [],
        speed_method=page.speed_method(),
        baseline_config=found.appendix.baseline_config(),
        commit=_commit(found),
        of_study=any(arm.arm.overrides for arm in result.arms),
    )


def render(template: str, figures: Sequence[Figure], **words: Any) -> str:
    """A page of a template, with style, scripts, figures and data inside."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(["html", "j2"], default=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(
        figures=figures,
        specs={figure.name: _json_in_html(figure.spec) for figure in figures},
        bundle=vega_bundle() if figures else "",
        style=(_TEMPLATES / "report.css").read_text(),
        script=(_TEMPLATES / "report.js").read_text(),
        **words,
    )


def markdown(found: Findings, figures: Sequence[Figure]) -> str:
    """The same in Markdown; the figures are links to their SVG files."""
    result, tables = found.result, _tables(found)
    drawn = [figure_markdown(figure) for figure in figures]
    opening = [f"- **{what}**: {text}" for what, text in page.opening(result)]
    advice = [f"{said.text} (rule {said.rule})" for said in found.advice]
    rules = [f"{number}. {rule}" for number, rule in enumerate(RULES, 1)]
    commands = [f"- {line.cells[0]}: `{line.cells[1]}`" for line in tables["commands"].lines]
    differ = tables["differences"].lines
    parts = [
        f"# {result.study.name}",
        f"**{result.study.question}**",
        "\n".join(opening),
        "\n\n".join(page.decision(result)),
        "## Verdicts",
        verdict_markdown(result),
        margin_line(result),
        "## What to use",
        " ".join(advice),
        "The rules:",
        "\n".join(rules),
        "## How sure",
        table_markdown(tables["certainty"]),
        *filter(None, [_p_value_line(found)]),
        "\n\n".join(found.certainty.lines()),
        *(["## Notes", "\n".join(f"- {note}" for note in result.notes)] if result.notes else []),
        *(["## Figures", *left_out(result, found.curves), *drawn] if drawn else []),
        *_speed_parts(found, tables),
        *(["## Main effects", table_markdown(tables["effects"])] if found.effects else []),
        *(["## Interactions", table_markdown(tables["interactions"])] if found.pairs else []),
        *(["## Settings", table_markdown(tables["differences"])] if differ else []),
        *(["## Commands", "\n".join(commands)] if commands else []),
        "## Machine, data and versions",
        table_markdown(tables["facts"]),
    ]
    return "\n\n".join(parts) + "\n"


def _p_value_line(found: Findings) -> str:
    """What the columns of p-values are; "" where there is none."""
    columns = certainty_table(found.certainty).columns
    return p_value_line(found.result) if any(c.startswith("p ") for c in columns) else ""


def _speed_parts(found: Findings, tables: dict[str, Table]) -> list[str]:
    if found.speed is None:
        return []
    told = [*headlines(found.speed), *notes(found.speed)]
    breaks = tables["breaks"]
    return [
        "## Measured speed",
        *(["\n".join(f"- {line}" for line in told)] if told else []),
        *([table_markdown(breaks)] if breaks.lines else []),
        table_markdown(tables["matches"]),
        table_markdown(tables["speeds"]),
        "\n\n".join(page.speed_method()),
    ]


def _tables(found: Findings) -> dict[str, Table]:
    result, appendix = found.result, found.appendix
    made = [
        verdict_table(result),
        certainty_table(found.certainty),
        effects_table(found.effects),
        interactions_table(found.pairs),
        telemetry_table(found.curves.telemetry),
        differences_table(result, appendix),
        commands_table(result, appendix),
        facts_table(result),
        runs_table(result),
    ]
    if found.speed is not None and found.speeds is not None:
        order = [arm.name for arm in result.arms]
        made.append(match_table(found.speeds, order))
        made += [break_even_table(found.speed), speed_table(found.speed)]
    return {table.id: table for table in made}


def figure_markdown(figure: Figure) -> str:
    """Title, picture and caption of a figure whose SVG lies in the folder figures."""
    return f"### {figure.title}\n\n![{figure.title}](figures/{figure.name}.svg)\n\n{figure.caption}"


def table_markdown(table: Table) -> str:
    """The table in Markdown."""
    lines = [[cell.replace("\n", "<br>") for cell in line.cells] for line in table.lines]
    return markdown_table(table.columns, lines)


def _commit(found: Findings) -> str | None:
    """The commit of the finished runs, when they share one."""
    summaries = [run.summary for run in found.result.runs if run.summary]
    commits = {s.get("commit") if "commits" not in s else None for s in summaries}
    return str(commits.pop()) if len(commits) == 1 and None not in commits else None


def _breakable(text: str) -> markupsafe.Markup:
    """A name that a narrow column may break after an underscore or a dot."""
    escaped = markupsafe.escape(text)
    for mark in "_.":
        escaped = escaped.replace(mark, markupsafe.Markup(f"{mark}<wbr>"))
    return escaped


def _json_in_html(value: Any) -> str:
    """JSON that cannot end or comment out its <script> element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
