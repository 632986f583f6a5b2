"""Titles and captions of a report's figures.

A figure of a study with one seed has no interval, no range of seeds and no front, so its caption
speaks of none.
"""

from __future__ import annotations

from zpp_lab.study.band import one_seed
from zpp_lab.study.effect_figures import MOST_PAIRS
from zpp_lab.study.figure_rows import lone_bands
from zpp_lab.study.palette import OTHERS, TOLD
from zpp_lab.study.verdict import StudyResult

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
_TEXTS = {
    "gap": "Point: mean over the seeds. Thin line: {confidence} interval. Thick line: the interval "
    "that the equivalence test compares with the margin (shaded). Ticks: single seeds. The axis is "
    "linear around 0 and logarithmic beyond the margin.",
    "gap_vs_bytes": "Bytes of a training step over all ranks, as a share of what {baseline} sends. "
    "Dashed: the Pareto front, which no arm beats in both (controls are left out of it). Lines: "
    "{confidence} interval; shaded: the margin.",
    "gap_vs_speed": "Measured tokens per second, one panel a bandwidth between nodes; further "
    "right is faster. An arm has the speed of a measurement whose recipe has the same settings. "
    "Dashed: the Pareto front. Lines: {confidence} interval; shaded: the margin.",
    "main_effects": "Grey: arms, joined where they are alike in every other factor. Thick: the "
    "mean over the groups that have all of its levels, with its {confidence} interval over the "
    "seeds. Shaded: the margin.",
    "interactions": "Mean gap at each pair of levels, over arms alike in every other factor, with "
    f"the {{confidence}} interval. Lines that are not parallel interact. At most {MOST_PAIRS} "
    "pairs, those farthest from additive first.",
    "loss": "Lines: mean over the seeds that reached a step; bands: lowest to highest seed. The "
    "training loss is smoothed (moving average) for display only; no verdict reads it. The axes "
    "differ, and neither goes beyond where the baseline starts.",
    "gap_curves": "Held-out loss minus that of the baseline with the same seed, at every "
    "evaluation; bands: {confidence} interval of the mean. Not smoothed. Shaded: the margin.",
    "gap_steps": "Training loss minus that of the baseline with the same seed, which has had the "
    "same tokens. Above: smoothed (moving average) for display only; lines: mean over the seeds; "
    "bands: lowest to highest seed. {apart}; lines: mean over the seeds. Shaded: the margin.",
    "telemetry": "NMSE, Σ(y−x)² / Σx², between what was encoded (x) and decoded (y), by wire and "
    "parameter class, mean over the seeds. An arm appears on the wires that it quantizes; a line "
    "may cover an equal one.",
    "telemetry_bias": "Σ(y−x) / Σ|x|: whether values shrink (below 0) or grow.",
    "telemetry_cosine": "1 − cosine of the values before and after: how far their direction "
    "turned.",
    "telemetry_saturated": "Share of the codes that lie at an end of their range.",
    "telemetry_zeroed": "Share of the values that were not 0 and became 0.",
}
_ONE_SEED = {
    "gap": "Point: the one seed; left of 0 its loss is lower than the baseline's. Shaded: the "
    "margin.{darker} The axis is linear around 0 and logarithmic beyond the margin.",
    "gap_vs_bytes": "Bytes of a training step over all ranks, as a share of what {baseline} sends. "
    "Shaded: the margin.{darker} No Pareto front: with one seed the order of the gaps may be "
    "noise.",
    "gap_vs_speed": "Measured tokens per second, one panel a bandwidth between nodes; further "
    "right is faster. An arm has the speed of a measurement whose recipe has the same settings. "
    "Shaded: the margin.{darker} No Pareto front: with one seed the order of the gaps may be "
    "noise.",
    "loss": "One seed an arm. The training loss is smoothed (moving average) for display only. The "
    "axes differ, and neither goes beyond where the baseline starts.",
    "gap_curves": "Held-out loss minus that of the baseline with the same seed, at every "
    "evaluation. Not smoothed. Shaded: the margin.",
    "gap_steps": "Training loss minus that of the baseline with the same seed, which has had the "
    "same tokens. Above: smoothed (moving average) for display only. {apart}. Shaded: the margin.",
}
_APART = (
    "Below: how large the gap is, without its sign and not smoothed, on a logarithmic axis: the "
    "largest of the last few steps (a fiftieth of the run); where an arm equals its baseline in "
    "every digit it has no line"
)
_COLORED = ("gap", "gap_vs_bytes", "gap_vs_speed", "loss", "gap_curves", "gap_steps")


def caption(name: str, result: StudyResult) -> str:
    """What the figure's marks mean, in this study."""
    lone = one_seed(result)
    text = _ONE_SEED.get(name, _TEXTS[name]) if lone else _TEXTS[name]
    text = text.format(
        baseline=result.compared_with,
        confidence=f"{result.study.confidence:.0%}",
        darker=" Darker, with a dashed edge: the noise band." if lone_bands(result) else "",
        apart=_APART,
    )
    return text + _band(name, result) + _missing(name, result) + _grey(name, result)


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
    if len(result.arms) <= TOLD or name not in _COLORED:
        return ""
    front = "" if one_seed(result) else "the arms on the Pareto front and "
    return f" Grey ({OTHERS}): not told apart, as there are too many arms; {front}the controls are."
