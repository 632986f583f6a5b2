"""All figures of a study's report: which of them the runs have data for, captions, SVG and PDF.

Pictures are drawn without a browser. A figure of a study with one seed has no interval, no range of
seeds and no front, so its caption speaks of none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from zpp_lab.files import write_atomic
from zpp_lab.study.judge.effects import Interaction, MainEffect, cells_of, short_names
from zpp_lab.study.judge.noise import one_seed
from zpp_lab.study.judge.verdict import StudyResult
from zpp_lab.study.report.figures.cost import (
    MOST_PAIRS,
    bytes_figure,
    interactions_figure,
    main_effects_figure,
    speed_figure,
)
from zpp_lab.study.report.figures.curves import MEASURES, Row, StudyCurves
from zpp_lab.study.report.figures.gap import (
    GAP,
    Spec,
    cost_rows,
    gap_figure,
    gap_rows,
    lone_bands,
    speed_rows,
    telling_arms,
)
from zpp_lab.study.report.figures.training import (
    BANDED,
    STEP_GAP,
    gap_figure_over_steps,
    loss_figure,
    telemetry_figure,
)
from zpp_lab.study.report.sections import Figure
from zpp_lab.study.report.style import LOOKS, OTHERS, Style, study_looks
from zpp_lab.study.report.table import SENT, sent_column
from zpp_lab.study.words import margin_nats

_BAND = "Darker, with a dashed edge: the noise band, ± the largest gap of {controls}"
TITLES = {
    "gap": "Held-out loss gap",
    "gap_vs_bytes": "Held-out loss gap against bytes sent",
    "gap_vs_speed": "Held-out loss gap against measured speed",
    "main_effects": "Main effects of the swept factors",
    "interactions": "Interactions of two factors",
    "loss": "Loss over training",
    "gap_curves": "Held-out loss gap over training",
    "gap_steps": "Training loss gap over training",
    "telemetry": "Codec error: normalized mean squared error",
    "telemetry_bias": "Codec error: bias",
    "telemetry_cosine": "Codec error: angle",
    "telemetry_saturated": "Codec error: saturated codes",
    "telemetry_zeroed": "Codec error: zeroed values",
}
NAMES = tuple(TITLES)
_FEWEST = 3  # steps with telemetry from which a curve of it says something
SUFFIXES = (".svg", ".pdf")
# a third of an SVG: words for screen readers, which no reader gets where a page shows an image
_UNREAD = re.compile(r' (?:role|aria-[a-z]+)="[^"]*"')
# Texts are measured here with one font and shown with the reader's, which may be wider.
ROOM = {"left": 24, "right": 48, "top": 8, "bottom": 8}
_BYTES = "Bytes of a training step over all ranks, as a share of what {baseline} sends. "
_SPEED = (
    "Measured tokens per second, one panel a bandwidth between nodes; further right is faster. An "
    "arm has the speed of a measurement whose recipe has the same settings. "
)
_NO_FRONT = (
    "Shaded: the margin.{darker} No Pareto front: with one seed the order of the gaps may be noise."
)
_TEXTS = {
    "gap": "Point: mean over the seeds. Line: the interval that decides the verdict, corrected for "
    "the number of arms. Ticks, where there is room: single seeds. Shaded: the margin, {margin}. "
    "The axis is linear around 0 and logarithmic beyond the margin. {bytes}",
    "gap_vs_bytes": f"{_BYTES}Dashed: the Pareto front, which no arm beats in both (controls are "
    "left out of it). Lines: the intervals that decide the verdicts; shaded: the margin.",
    "gap_vs_speed": f"{_SPEED}Dashed: the Pareto front. Lines: the intervals that decide the "
    "verdicts; shaded: the margin.",
    "main_effects": "Grey: arms, joined where every other factor is the same. Thick: the mean "
    "over the groups that have all levels, with its {confidence} interval over the seeds. Shaded: "
    "the margin.",
    "interactions": "Mean gap at each pair of levels, over arms with the same other factors, with "
    f"the {{confidence}} interval. Lines that are not parallel interact. At most {MOST_PAIRS} "
    "pairs, those farthest from additive first.",
    "loss": "Lines: mean over the seeds that reached a step. Band: lowest to highest seed of one "
    "arm, the baseline where it has run. The training loss is smoothed (moving average) for "
    "display only. The axes differ and end where the baseline starts. Lines that coincide here are "
    "apart in the figures of gaps.",
    "gap_curves": "Held-out loss minus that of the baseline with the same seed, at every "
    "evaluation{bands}. Not smoothed. Shaded: the margin.",
    "gap_steps": "Training loss minus that of the baseline with the same seed, which has had the "
    "same tokens, smoothed (moving average) for display only. Lines: mean over the seeds{bands}. "
    "Shaded: the margin.",
    "telemetry": "NMSE, Σ(y−x)² / Σx², between what was encoded (x) and decoded (y), by wire and "
    "parameter class, mean over the seeds. An arm appears on the wires that it quantizes; a line "
    "may cover an equal one.",
    "telemetry_bias": "Σ(y−x) / Σ|x|: whether values shrink (below 0) or grow.",
    "telemetry_cosine": "1 − cosine between the values before and after: the change of their "
    "direction.",
    "telemetry_saturated": "Share of the codes that lie at an end of their range.",
    "telemetry_zeroed": "Share of the nonzero values that became 0.",
}
_ONE_SEED = {
    "gap": "Point: the one seed; left of 0 its loss is lower than the baseline's. Shaded: the "
    "margin.{darker} The axis is linear around 0 and logarithmic beyond the margin. {bytes}",
    "gap_vs_bytes": f"{_BYTES}{_NO_FRONT}",
    "gap_vs_speed": f"{_SPEED}{_NO_FRONT}",
    "loss": "One seed an arm. The training loss is smoothed (moving average) for display only. The "
    "axes differ, and neither goes beyond where the baseline starts.",
    "gap_curves": "Held-out loss minus that of the baseline with the same seed, at every "
    "evaluation. Not smoothed. Shaded: the margin.",
    "gap_steps": "Training loss minus that of the baseline with the same seed, which has had the "
    "same tokens, smoothed (moving average) for display only. Shaded: the margin.",
}
_COLORED = ("gap_vs_bytes", "gap_vs_speed", "loss", "gap_curves", "gap_steps")


def caption(name: str, result: StudyResult) -> str:
    """Return what the figure's marks mean, in this study."""
    lone = one_seed(result)
    text = _ONE_SEED.get(name, _TEXTS[name]) if lone else _TEXTS[name]
    text = text.format(
        baseline=result.compared_with,
        confidence=f"{result.study.confidence:.0%}",
        margin=margin_nats(result) if result.margin else "",
        darker=" Darker, with a dashed edge: the noise band." if lone_bands(result) else "",
        bands=_bands(name, result),
        bytes=f"Bytes: a step's {SENT[sent_column(result)]}, as a share of the baseline's.",
    )
    return text + _band(name, result) + _missing(name, result) + _grey(name, result)


def _bands(name: str, result: StudyResult) -> str:
    """What the bands of a figure of gaps are, where it has some."""
    if len(result.arms) - 1 > BANDED:
        return ""
    if name == "gap_steps":
        return "; bands: lowest to highest seed"
    return f"; bands: {result.study.confidence:.0%} interval of the mean"


def _band(name: str, result: StudyResult) -> str:
    where = {"gap_curves": "there", "gap_steps": "up to a step"}.get(name)
    controls = [arm.name for arm in result.arms if arm.arm.role == "order_control" and arm.gaps]
    if where is None or not controls:
        return ""
    return f" {_BAND.format(controls=', '.join(controls))} {where}."


def _missing(name: str, result: StudyResult) -> str:
    """The arms that the figure of gaps cannot show, and why."""
    none = [f"{arm.name} ({arm.verdict})" for arm in result.arms if arm.gap is None]
    none = [text for text in none if not text.endswith("(baseline)")]
    return f" Without a gap: {', '.join(none)}." if none and name == "gap" else ""


def _grey(name: str, result: StudyResult) -> str:
    if len(result.arms) <= LOOKS or name not in _COLORED:
        return ""
    front = "" if one_seed(result) else "the arms on the Pareto front and "
    return f" Grey ({OTHERS}): too many for a colour each; {front}the controls have one."


def make_figures(
    result: StudyResult,
    curves: StudyCurves,
    effects: Sequence[MainEffect] = (),
    pairs: Sequence[Interaction] = (),
    speeds: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Figure]:
    """Return the figures that the runs have data for, in the page's order."""
    style = Style(study_looks(result.study, telling_arms(result)), result.study.baseline)
    gaps, margin = gap_rows(result), result.margin or 0.0
    costs = [row for row in cost_rows(result) if row["bytes_total"] is not None]
    factors = [effect.factor for effect in effects] + [f for one in pairs for f in one.factors]
    short = short_names(factors)
    measured = {b: s for b, s in (speeds or {}).items() if len(speed_rows(result, s)) > 1}

    def over_steps(rows: Sequence[Row], series: str, title: str) -> Spec:
        return gap_figure_over_steps(rows, margin, style, curves.noise.get(series, ()), title)

    wanted: dict[str, tuple[Any, Callable[[], Spec]]] = {
        "gap": (gaps, lambda: gap_figure(result, style)),
        "gap_vs_bytes": (gaps and len(costs) > 1, lambda: bytes_figure(result, style)),
        "gap_vs_speed": (gaps and measured, lambda: speed_figure(result, measured, style)),
        "main_effects": (effects, lambda: main_effects_figure(effects, margin, short)),
        "interactions": (pairs, lambda: interactions_figure(pairs, margin, short)),
        "loss": (curves.loss, lambda: loss_figure(curves.loss, style)),
        "gap_curves": (curves.gap and margin, lambda: over_steps(curves.gap, "held-out", GAP)),
        "gap_steps": (
            curves.steps and margin,
            lambda: over_steps(curves.steps, "training", STEP_GAP),
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
    """Return sentences on figures that would show nothing, and why."""
    lines = []
    if one_seed(result) and cells_of(result):
        lines.append(
            "Main effects and interactions of factors are left out: with one seed they have no "
            "interval and may be noise."
        )
    if any(row["step"] > 0 for row in curves.telemetry) and not _telemetry_steps(curves):
        lines.append(
            f"Codec errors over training are left out: fewer than {_FEWEST} steps have telemetry "
            "(tracking.telemetry_every); the table has their means."
        )
    return lines


def _telemetry_steps(curves: StudyCurves) -> list[Row]:
    """The rows of steps, where there are enough of these to make a curve."""
    rows = [row for row in curves.telemetry if row["step"] > 0]
    return rows if len({row["step"] for row in rows}) >= _FEWEST else []


def _telemetry(steps: Sequence[Row], measure: str, style: Style) -> Spec:
    shown = [row for row in steps if (row.get("nmse") or 0) > 0]
    return telemetry_figure(shown, measure, style) if shown else {}


def write_pictures(
    folder: Path,
    figures: Sequence[Figure],
    known: Sequence[str],
    in_unit: Callable[[str], str] = str,
) -> list[Path]:
    """Write every figure into `folder`; remove others of `known` that lie there. in_unit: gives a
    text the study's unit."""
    folder.mkdir(exist_ok=True)
    made = {figure.name for figure in figures}
    for name in set(known) - made:
        for suffix in SUFFIXES:
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
    paths = []
    for figure in figures:
        spec = in_unit(json.dumps(figure.spec | {"padding": ROOM}, ensure_ascii=False))
        svg = vl_convert.vegalite_to_svg(spec, vl_version=vegalite_version())
        write_atomic(folder / f"{figure.name}.svg", _UNREAD.sub("", svg))
        (folder / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
        paths += [folder / f"{figure.name}{suffix}" for suffix in SUFFIXES]
    return paths


@cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, safe inside <script>."""
    bundle = vl_convert.javascript_bundle(vl_version=vegalite_version())  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def vegalite_version() -> str:
    """Return the Vega-Lite that Altair writes for, as vl-convert names it ("6.1")."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
