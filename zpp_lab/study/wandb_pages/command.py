"""`zpp-lab dashboard`: a study's pages as a file, and into wandb where there is a key for it. The
only file that knows wandb-workspaces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zpp_lab.config.compose import load_study
from zpp_lab.config.parser import check_own
from zpp_lab.config.study import StudyConfig
from zpp_lab.files import STUDY_FILE, nearest, write_atomic
from zpp_lab.runs.reader import read_study
from zpp_lab.runs.wandb.mode import find_key, resolve
from zpp_lab.study.wandb_pages.publish import study_project, tracking_of
from zpp_lab.study.wandb_pages.spec import FILE, Panel, Spec, make_spec, read_spec

_FIELDS = {"group": "Group", "job_type": "JobType"}  # wandb's names of what runs are grouped by
_RUN_KEYS = {"job_type": "jobType"}


def pages(spec: Spec, entity: str) -> tuple[Any, Any]:
    """Return (workspace, report) as wandb-workspaces' objects, not saved yet; nothing is asked for.

    ValueError when the package is not installed or the specification has an unknown panel.
    """
    try:
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise ValueError(
            f"dashboards need the wandb-workspaces package ({error}): "
            "run `pip install 'zpp_lab[dashboard]'`"
        ) from None
    from wandb_workspaces import expr

    settings = ws.RunsetSettings(
        filters=_filters(spec, "all"),  # the verdict table is the report run's
        groupby=[expr.Metric(_FIELDS[spec["runs"]["group_by"]])],
        group_colors=dict(spec["runs"]["colors"]),
        pinned_columns=list(spec["columns"]),
    )
    sections = [
        ws.Section(name=s["name"], panels=[_panel(p) for p in s["panels"]], is_open=True)
        for s in spec["sections"]
    ]
    workspace = ws.Workspace(
        entity=entity,
        project=spec["project"],
        name=spec["title"],
        sections=sections,
        runset_settings=settings,
    )
    return workspace, _report(spec, entity)


def apply(spec: Spec) -> list[str]:
    """Save both pages; returns their addresses. wandb's errors when the service refuses.

    Each call makes new pages and leaves those of an earlier call as they are.
    """
    entity = spec["entity"]
    if entity is None:
        import wandb

        entity = wandb.Api().default_entity
    workspace, report = pages(spec, entity)
    return [str(page.save().url) for page in (report, workspace)]


def _report(spec: Spec, entity: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    blocks: list[Any] = [wr.MarkdownBlock(text=spec["text"])]
    for section in spec["sections"]:
        blocks += [wr.H2(text=section["name"]), _grid(spec, section)]
    return wr.Report(
        entity=entity,
        project=spec["project"],
        title=spec["title"],
        description=spec["description"],
        width="fluid",
        blocks=blocks,
    )


def _grid(spec: Spec, section: dict[str, Any]) -> Any:
    import wandb_workspaces.reports.v2 as wr

    name, key = section["runs"], _RUN_KEYS[spec["runs"]["group_by"]]
    grouped = [key] if name == "arms" else []
    runs = wr.Runset(name=name, filters=_filters(spec, name), groupby=grouped)
    colors: dict[Any, Any] = {
        wr.RunsetGroup(name, (wr.RunsetGroupKey(wr.Metric(f"run:{key}"), arm),)): color
        for arm, color in (spec["runs"]["colors"] if grouped else {}).items()
    }
    panels = [_panel(panel) for panel in section["panels"]]
    return wr.PanelGrid(runsets=[runs], panels=panels, custom_run_colors=colors)


def _filters(spec: Spec, runs: str) -> Any:
    """`all` of the study, `arms` and `runs` without the run of its report, `report` that alone."""
    from wandb_workspaces import expr

    kind, other = expr.Metric("JobType"), spec["runs"]["not_job_type"]
    arms = [kind != other]
    chosen = {"all": [], "arms": arms, "runs": arms, "report": [kind == other]}
    return expr.And(expr.Metric("Group") == spec["runs"]["group"], *chosen[runs])


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    makers = {"line": _line, "bar": _bar, "scatter": _scatter, "coordinates": _coordinates}
    if panel["kind"] == "table":
        return wr.WeavePanelSummaryTable(table_name=panel["name"], layout=wr.Layout(w=24, h=10))
    if panel["kind"] not in makers:
        raise ValueError(f"panel kind {panel['kind']!r}: use {', '.join(makers)} or table")
    return makers[panel["kind"]](panel)


def _line(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(
        title=panel["title"],
        x=wr.Metric(panel["x"]),
        y=[wr.Metric(name) for name in panel["y"]],
        metric_regex=panel.get("regex"),
        log_y=panel.get("log_y"),
        groupby=wr.Metric(_FIELDS[panel["group_by"]]),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        smoothing_type="none",
        max_runs_to_show=100,
    )


def _bar(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.BarPlot(
        title=panel["title"],
        metrics=[wr.Metric(panel["metric"])],
        groupby=wr.Metric(_FIELDS[panel["group_by"]]),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_bars_to_show=100,
    )


def _scatter(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    x, y = (wr.SummaryMetric(panel[axis].removeprefix("summary:")) for axis in ("x", "y"))
    return wr.ScatterPlot(title=panel["title"], x=x, y=y)


def _coordinates(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    kinds: dict[str, Any] = {"config": wr.Config, "summary": wr.SummaryMetric}
    named = [column.partition(":") for column in panel["columns"]]
    columns = [wr.ParallelCoordinatesPlotColumn(kinds[kind](name)) for kind, _, name in named]
    return wr.ParallelCoordinatesPlot(title=panel["title"], columns=columns)


def dashboard(
    target: str, out: Path | None = None, project: str | None = None, entity: str | None = None
) -> int:
    """Write the specification for a study's folder, name or YAML file, and apply it if online.

    Without a key for wandb the file is all: `apply_file` takes it later, anywhere. Returns the
    exit code. ValueError for what is no study.
    """
    root = Path(target)
    if root.is_dir():
        study, tracking = _study_of(root), tracking_of(root)
        out, (verdicts, found) = out or root / FILE, _judged(root)
    else:
        study, tracking, verdicts, found = _planned(root, target), {}, "", []
        out = out or Path(f"{study.name}-{FILE}")
    check_own("--out", out, '"not_job_type"')
    spec = make_spec(
        study,
        project=project or study_project(root),
        entity=entity or tracking.get("entity"),
        verdicts=verdicts,
        chosen=found,
    )
    write_atomic(out, json.dumps(spec, indent=1, ensure_ascii=False) + "\n")
    mode, why = resolve("auto")
    if mode == "online":
        return apply_file(out)
    print(f"{out}: the specification of the pages, not applied ({why}). With a key for wandb:")
    print(f"  zpp-lab dashboard --apply {out}")
    return 0


def apply_file(path: Path) -> int:
    """Make the pages that a specification describes; prints their addresses.

    ValueError without the package, a key or a specification; 1 when the service refuses.
    """
    spec = read_spec(path)
    if find_key() is None:
        raise ValueError("dashboards need an API key: run `wandb login`, or set WANDB_API_KEY")
    try:
        print("\n".join(apply(spec)))
    except ValueError:
        raise
    except Exception as error:  # wandb's, the network's: the file is there for another time
        print(
            f"wandb rejected the pages ({type(error).__name__}: {error}). Try again with "
            f"zpp-lab dashboard --apply {path}",
            file=sys.stderr,
        )
        return 1
    return 0


def _planned(root: Path, target: str) -> StudyConfig:
    """A study by its name or YAML file."""
    try:
        return load_study(target)
    except ValueError as error:
        near = nearest(root)
        hint = f", or a study's folder: did you mean {near}?" if near and near.is_dir() else ""
        raise ValueError(f"{error}{hint}") from None


def _study_of(root: Path) -> StudyConfig:
    study = read_study(root)
    if study is None:
        raise ValueError(f"{root}: {STUDY_FILE} not found; use a folder that zpp-lab study wrote")
    return study


def _judged(root: Path) -> tuple[str, list[str]]:
    """(the verdict table as of now, the arms with colours); nothing without packages."""
    try:
        from zpp_lab.study.judge.verdict import read_result
        from zpp_lab.study.report.contents import verdict_table
        from zpp_lab.study.report.figures.gap import telling_arms
        from zpp_lab.study.report.render import table_markdown
        from zpp_lab.study.report.table import margin_line
        from zpp_lab.study.words import in_unit
    except ModuleNotFoundError as error:
        print(
            f"the pages have no verdicts ({error}): pip install 'zpp_lab[report]', then try again",
            file=sys.stderr,
        )
        return "", []
    result: Any = read_result(root)
    notes = "\n".join(f"- {note}" for note in result.notes)
    verdicts = table_markdown(verdict_table(result))
    text = "\n\n".join(filter(None, [verdicts, margin_line(result), notes]))
    return in_unit(result, text), telling_arms(result)
