"""All figures of a report: which of them the runs have data for, with titles and captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zpp_lab.study.curve_figures import (
    STEP_GAP,
    gap_curves_figure,
    loss_figure,
    telemetry_figure,
)
from zpp_lab.study.curves import MEASURES, Row, StudyCurves
from zpp_lab.study.effect_figures import MOST_PAIRS, interactions_figure, main_effects_figure
from zpp_lab.study.effects import Interaction, MainEffect
from zpp_lab.study.figure_rows import cost_rows, gap_rows, speed_rows, telling_arms
from zpp_lab.study.gap_figures import Spec, bytes_figure, gap_figure, speed_figure
from zpp_lab.study.levels import short_names
from zpp_lab.study.style import OTHERS, TOLD, Style
from zpp_lab.study.verdict import StudyResult

_TEXTS = {
    "gap": (
        "Held-out loss gap",
        "Point: mean over the seeds. Thin line: {confidence} interval. Thick line: the interval "
        "that the equivalence test compares with the margin (shaded). Ticks: single seeds. The "
        "axis is linear around 0 and logarithmic beyond the margin.",
    ),
    "gap_vs_bytes": (
        "Loss gap against bytes sent",
        "Bytes of a training step over all ranks, as a share of what {baseline} sends. Dashed: "
        "the Pareto front, which no arm beats in both (controls are left out of it). Lines: "
        "{confidence} interval; shaded: the margin.",
    ),
    "gap_vs_speed": (
        "Loss gap against measured speed",
        "Measured tokens per second, one panel a bandwidth between nodes; further right is faster. "
        "An arm has the speed of a measurement whose recipe has the same settings. Dashed: the "
        "Pareto front. Lines: {confidence} interval; shaded: the margin.",
    ),
    "main_effects": (
        "Main effects of the swept factors",
        "Grey: arms, joined where they are alike in every other factor. Thick: the mean over the "
        "groups that have all of its levels, with its {confidence} interval over the seeds. "
        "Shaded: the margin.",
    ),
    "interactions": (
        "Interactions of two factors",
        "Mean gap at each pair of levels, over arms alike in every other factor, with the "
        f"{{confidence}} interval. Lines that are not parallel interact. At most {MOST_PAIRS} "
        "pairs, those farthest from additive first.",
    ),
    "loss": (
        "Loss over training",
        "Lines: mean over the seeds that reached a step; bands: lowest to highest seed. The "
        "training loss is smoothed (moving average) for display only; no verdict reads it. The "
        "axis ends where the baseline starts.",
    ),
    "gap_curves": (
        "Loss gap over training",
        "Held-out loss minus that of the baseline with the same seed, at every evaluation; bands: "
        "{confidence} interval of the mean. Not smoothed. Shaded: the margin.{heldout_noise}",
    ),
    "gap_steps": (
        "Training loss gap over training",
        "Training loss minus that of the baseline with the same seed, which has had the same "
        "tokens; smoothed (moving average) for display only. Lines: mean over the seeds; bands: "
        "lowest to highest seed. Shaded: the margin.{training_noise}",
    ),
    "telemetry": (
        "Codec error: normalized mean squared error",
        "NMSE, Σ(y−x)² / Σx², between what was encoded (x) and decoded (y), by wire and parameter "
        "class, mean over the seeds. An arm appears on the wires that it quantizes.",
    ),
    "telemetry_bias": (
        "Codec error: bias",
        "Σ(y−x) / Σ|x|: whether values shrink (below 0) or grow.",
    ),
    "telemetry_cosine": (
        "Codec error: angle",
        "1 − cosine of the values before and after: how far their direction turned.",
    ),
    "telemetry_saturated": (
        "Codec error: saturated codes",
        "Share of the codes that lie at an end of their range.",
    ),
    "telemetry_zeroed": (
        "Codec error: zeroed values",
        "Share of the values that were not 0 and became 0.",
    ),
}
NAMES = tuple(_TEXTS)


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
    style = Style(telling_arms(result), result.study.baseline)
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
            lambda: gap_curves_figure(
                curves.steps, margin, style, curves.noise.get("training", ()), STEP_GAP, False
            ),
        ),
    }
    steps = [row for row in curves.telemetry if row["step"] > 0]
    specs = {name: make() for name, (data, make) in wanted.items() if data}
    for measure in MEASURES:
        name = "telemetry" if measure == "nmse" else f"telemetry_{measure}"
        if steps and (spec := _telemetry(steps, measure, style)):
            specs[name] = spec
    return [Figure(name, *_words(name, result), specs[name]) for name in NAMES if name in specs]


def _telemetry(steps: Sequence[Row], measure: str, style: Style) -> Spec:
    shown = [row for row in steps if (row.get("nmse") or 0) > 0]
    return telemetry_figure(shown, measure, style) if shown else {}


def _words(name: str, result: StudyResult) -> tuple[str, str]:
    title, caption = _TEXTS[name]
    words = {"baseline": result.compared_with, "confidence": f"{result.study.confidence:.0%}"}
    controls = [arm.name for arm in result.arms if arm.arm.role == "order_control" and arm.gaps]
    for kind, where in (("heldout_noise", "there"), ("training_noise", "near a step")):
        said = f" Grey, dashed: the noise band, ± the largest gap of {', '.join(controls)} {where}."
        words[kind] = said if controls else ""
    caption = caption.format(**words)
    if len(result.arms) > TOLD and name in _COLORED:
        caption += (
            f" Grey ({OTHERS}): not told apart, as there are too many arms; the arms on the "
            "Pareto front and the controls are."
        )
    return title, caption


_COLORED = ("gap", "gap_vs_bytes", "gap_vs_speed", "loss", "gap_curves", "gap_steps")
