"""Writes a study's report: report.html (one file, works offline), report.md, results.csv, figures.

Everything is read from the run folders, so a report can be rebuilt at any time,
also while a study runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert

from zpp_lab.config import StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.study import page
from zpp_lab.study.arms import study_of
from zpp_lab.study.curves import MEASURES, StudyCurves, final_telemetry, study_curves
from zpp_lab.study.figures import make_figures
from zpp_lab.study.html_table import verdict_html
from zpp_lab.study.runs import find_runs, read_study
from zpp_lab.study.table import (
    console_table,
    margin_line,
    markdown_table,
    results_csv,
    verdict_markdown,
)
from zpp_lab.study.verdict import StudyResult, judge_study

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Report:
    """What was written, and the verdict table for a console."""

    html: Path
    markdown: Path
    csv: Path
    figures: Sequence[Path]
    table: str


def build_report(root: Path, study: StudyConfig | None = None) -> Report:
    """Write the report of the runs at and below `root` into `root`.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    Raises ValueError when there are no runs or one cannot be read.
    """
    result = read_result(root, study)
    curves = study_curves(result)
    specs = make_figures(result, curves)
    page_file, text_file, csv_file = (
        root / name for name in ("report.html", "report.md", "results.csv")
    )
    write_atomic(csv_file, results_csv(result))
    write_atomic(text_file, _markdown(result, list(specs)))
    drawn = _write_svgs(root / "figures", specs)
    write_atomic(page_file, _html(result, curves, specs))
    return Report(page_file, text_file, csv_file, drawn, console_table(result))


def read_result(root: Path, study: StudyConfig | None = None) -> StudyResult:
    """The verdicts of the runs at and below `root`; see `build_report`."""
    runs = find_runs(root)
    study = study or read_study(root)
    if study is not None:
        return judge_study(study, runs)
    return judge_study(*study_of(root.resolve().name, runs))


def _write_svgs(folder: Path, specs: Mapping[str, dict[str, Any]]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name in page.FIGURES:
        if name not in specs:
            (folder / f"{name}.svg").unlink(missing_ok=True)  # of an earlier report
    for name, spec in specs.items():
        svg = vl_convert.vegalite_to_svg(spec, vl_version=_vegalite_version())
        write_atomic(folder / f"{name}.svg", svg)
    return [folder / f"{name}.svg" for name in specs]


def _html(result: StudyResult, curves: StudyCurves, specs: Mapping[str, dict[str, Any]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        result=result,
        study=result.study,
        decision=page.decision(result),
        verdicts=verdict_html(result),
        margin_line=margin_line(result),
        figures=page.figures(list(specs), result),
        specs={name: _json_in_html(spec) for name, spec in specs.items()},
        bundle=_vega_bundle(),
        telemetry=final_telemetry(curves.telemetry),
        measures=MEASURES,
        keys=page.changed_keys(result),
        settings={arm.name: page.settings_of(result, arm) for arm in result.arms},
        commands={arm.name: page.command(result, arm) for arm in result.arms},
        facts=page.facts(result),
    )


def _markdown(result: StudyResult, names: list[str]) -> str:
    figures = [
        f"### {figure.title}\n\n![{figure.title}](figures/{figure.name}.svg)\n\n{figure.caption}"
        for figure in page.figures(names, result)
    ]
    commands = [(arm.name, page.command(result, arm)) for arm in result.arms]
    lines = [f"- {name}: `{text}`" for name, text in commands if text]
    parts = [
        f"# {result.study.name}",
        f"**{result.study.question}**",
        "\n\n".join(page.decision(result)),
        "## Verdicts",
        verdict_markdown(result),
        margin_line(result),
        *(["## Notes", "\n".join(f"- {note}" for note in result.notes)] if result.notes else []),
        *(["## Figures", *figures] if figures else []),
        *(["## Commands", "\n".join(lines)] if lines else []),
        "## Machine, data and versions",
        markdown_table(["What", "Value"], page.facts(result)),
    ]
    return "\n\n".join(parts) + "\n"


def _json_in_html(value: Any) -> str:
    """JSON that cannot end or comment out its <script> element."""
    return json.dumps(value).replace("<", "\\u003c")


def _vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    bundle = vl_convert.javascript_bundle(vl_version=_vegalite_version())  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")


def _vegalite_version() -> str:
    """The Vega-Lite that Altair writes for, as vl-convert names it ("6.1")."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
