"""All figures of a report: which of them the runs have data for, with titles and captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zpp_lab.study.band import one_seed
from zpp_lab.study.captions import TITLES, caption
from zpp_lab.study.cost_figures import bytes_figure, speed_figure
from zpp_lab.study.curve_figures import (
    gap_curves_figure,
    gap_steps_figure,
    loss_figure,
    telemetry_figure,
)
from zpp_lab.study.curves import MEASURES, Row, StudyCurves
from zpp_lab.study.effect_figures import interactions_figure, main_effects_figure
from zpp_lab.study.effects import Interaction, MainEffect
from zpp_lab.study.figure_rows import cost_rows, gap_rows, speed_rows, telling_arms
from zpp_lab.study.gap_figures import Spec, gap_figure
from zpp_lab.study.levels import cells_of, short_names
from zpp_lab.study.palette import study_looks
from zpp_lab.study.style import Style
from zpp_lab.study.verdict import StudyResult

NAMES = tuple(TITLES)
_FEWEST = 3  # steps with telemetry from which a curve of it says something


@dataclass(frozen=True)
class Figure:
    """One figure: its Vega-Lite specification with its data, and its words."""

    name: str
    title: str
    caption: str
    spec: Spec


def make_figures(
    result: StudyResult,
    curves: StudyCurves,
    effects: Sequence[MainEffect] = (),
    pairs: Sequence[Interaction] = (),
    speeds: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Figure]:
    """The figures that the runs have data for, in the page's order."""
    style = Style(study_looks(result.study, telling_arms(result)), result.study.baseline)
    gaps, margin = gap_rows(result), result.margin or 0.0
    costs = [row for row in cost_rows(result) if row["bytes_total"] is not None]
    factors = [effect.factor for effect in effects] + [f for one in pairs for f in one.factors]
    short = short_names(factors)
    measured = {b: s for b, s in (speeds or {}).items() if len(speed_rows(result, s)) > 1}
    wanted: dict[str, tuple[Any, Callable[[], Spec]]] = {
        "gap": (gaps, lambda: gap_figure(result, style)),
        "gap_vs_bytes": (gaps and len(costs) > 1, lambda: bytes_figure(result, style)),
        "gap_vs_speed": (gaps and measured, lambda: speed_figure(result, measured, style)),
        "main_effects": (effects, lambda: main_effects_figure(effects, margin, short)),
        "interactions": (pairs, lambda: interactions_figure(pairs, margin, short)),
        "loss": (curves.loss, lambda: loss_figure(curves.loss, style)),
        "gap_curves": (
            curves.gap and result.margin,
            lambda: gap_curves_figure(curves.gap, margin, style, curves.noise.get("held-out", ())),
        ),
        "gap_steps": (
            curves.steps and result.margin,
            lambda: gap_steps_figure(
                curves.steps, curves.apart, margin, style, curves.noise.get("training", ())
            ),
        ),
    }
    steps = _telemetry_steps(curves)
    specs = {name: make() for name, (data, make) in wanted.items() if data}
    for measure in MEASURES:
        name = "telemetry" if measure == "nmse" else f"telemetry_{measure}"
        if steps and (spec := _telemetry(steps, measure, style)):
            specs[name] = spec
    return [
        Figure(name, TITLES[name], caption(name, result), specs[name])
        for name in NAMES
        if name in specs
    ]


def left_out(result: StudyResult, curves: StudyCurves) -> list[str]:
    """Sentences on figures that would show nothing, and why."""
    said = []
    if one_seed(result) and cells_of(result):
        said.append(
            "Main effects and interactions of factors are left out: with one seed they have no "
            "interval, and what they show may be noise."
        )
    if any(row["step"] > 0 for row in curves.telemetry) and not _telemetry_steps(curves):
        said.append(
            f"Codec errors over training are left out: fewer than {_FEWEST} steps have telemetry "
            "(tracking.telemetry_every); the table has their means."
        )
    return said


def _telemetry_steps(curves: StudyCurves) -> list[Row]:
    """The rows of steps, where there are enough of these to make a curve."""
    rows = [row for row in curves.telemetry if row["step"] > 0]
    return rows if len({row["step"] for row in rows}) >= _FEWEST else []


def _telemetry(steps: Sequence[Row], measure: str, style: Style) -> Spec:
    shown = [row for row in steps if (row.get("nmse") or 0) > 0]
    return telemetry_figure(shown, measure, style) if shown else {}
