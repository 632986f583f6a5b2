"""The report as one HTML page and as Markdown, from what `report.find_out` found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

from zpp_lab.study import page
from zpp_lab.study.advice import RULES
from zpp_lab.study.figures import Figure
from zpp_lab.study.html_table import (
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
from zpp_lab.study.pictures import vega_bundle
from zpp_lab.study.table import margin_line, markdown_table, verdict_markdown

if TYPE_CHECKING:
    from zpp_lab.study.report import Findings

_TEMPLATES = Path(__file__).parent / "templates"
_FOLDED = "telemetry_"  # figures behind a fold: more of the same


def html(found: Findings, figures: Sequence[Figure]) -> str:
    """The whole page, with its style, scripts and data inside."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(["html", "j2"], default=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    result = found.result
    return environment.get_template("report.html.j2").render(
        result=result,
        study=result.study,
        opening=page.opening(result),
        controls_hold=page.controls_hold(result),
        decision=page.decision(),
        certainty=found.certainty.lines(),
        margin_line=margin_line(result),
        advice=found.advice,
        rules=RULES,
        figures=figures,
        shown=[figure for figure in figures if not figure.name.startswith(_FOLDED)],
        folded=[figure for figure in figures if figure.name.startswith(_FOLDED)],
        effect_notes=page.effect_notes(found.effects),
        tables=_tables(found),
        bench=found.bench,
        baseline_config=found.appendix.baseline_config(),
        commit=_commit(found),
        of_study=any(arm.arm.overrides for arm in result.arms),
        specs={figure.name: _json_in_html(figure.spec) for figure in figures},
        bundle=vega_bundle() if figures else "",
        style=(_TEMPLATES / "report.css").read_text(),
        script=(_TEMPLATES / "report.js").read_text(),
    )


def markdown(found: Findings, figures: Sequence[Figure]) -> str:
    """The same in Markdown; the figures are links to their SVG files."""
    result, tables = found.result, _tables(found)
    drawn = [
        f"### {figure.title}\n\n![{figure.title}](figures/{figure.name}.svg)\n\n{figure.caption}"
        for figure in figures
    ]
    opening = [f"- **{what}**: {text}" for what, text in page.opening(result)]
    advice = [f"{said.text} (rule {said.rule})" for said in found.advice]
    rules = [f"{number}. {rule}" for number, rule in enumerate(RULES, 1)]
    commands = [f"- {line.cells[0]}: `{line.cells[1]}`" for line in tables["commands"].lines]
    differ = tables["differences"].lines
    parts = [
        f"# {result.study.name}",
        f"**{result.study.question}**",
        "\n".join(opening),
        "\n\n".join(page.decision()),
        "## Verdicts",
        verdict_markdown(result),
        margin_line(result),
        "## What to use",
        " ".join(advice),
        "The rules:",
        "\n".join(rules),
        "## How sure",
        _markdown_of(tables["certainty"]),
        "\n\n".join(found.certainty.lines()),
        *(["## Notes", "\n".join(f"- {note}" for note in result.notes)] if result.notes else []),
        *(["## Figures", *drawn] if drawn else []),
        *(["## Main effects", _markdown_of(tables["effects"])] if found.effects else []),
        *(["## Interactions", _markdown_of(tables["interactions"])] if found.pairs else []),
        *(["## Settings", _markdown_of(tables["differences"])] if differ else []),
        *(["## Commands", "\n".join(commands)] if commands else []),
        "## Machine, data and versions",
        _markdown_of(tables["facts"]),
    ]
    return "\n\n".join(parts) + "\n"


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
    return {table.id: table for table in made}


def _markdown_of(table: Table) -> str:
    lines = [[cell.replace("\n", "<br>") for cell in line.cells] for line in table.lines]
    return markdown_table(table.columns, lines)


def _commit(found: Findings) -> str | None:
    """The commit of the finished runs, when they share one."""
    commits = {run.summary.get("commit") for run in found.result.runs if run.summary}
    return str(commits.pop()) if len(commits) == 1 and None not in commits else None


def _breakable(text: str) -> markupsafe.Markup:
    """A name that a narrow column may break after an underscore."""
    return markupsafe.escape(text).replace("_", markupsafe.Markup("_<wbr>"))


def _json_in_html(value: Any) -> str:
    """JSON that cannot end or comment out its <script> element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
