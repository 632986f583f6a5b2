"""Curves over training, averaged over an arm's seeds and thinned out for display.

The verdict never reads these: smoothing and thinning are for the eye only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zpp_lab.study.runs import Run, read_metrics
from zpp_lab.study.stats import t_interval
from zpp_lab.study.verdict import StudyResult

POINTS = 150  # a curve's points in a figure
MEASURES = ("nmse", "bias", "cosine", "saturated", "zeroed")
Row = dict[str, Any]
Points = dict[int, float]  # step → value


@dataclass
class RunCurves:
    """One run's series by step. Values that are not finite are left out."""

    training: Points = field(default_factory=dict)  # smoothed, nats per token
    heldout: Points = field(default_factory=dict)  # nats per token
    telemetry: dict[tuple[str, str, str], Points] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyCurves:
    """Tidy rows for the figures; every row has arm and step.

    loss: series (training, held-out), mean, low, high (lowest and highest seed).
    gap: held-out loss minus the baseline's; mean, low, high (confidence interval of the mean).
    telemetry: wire, param_class and one column a measure (mean over seeds).
    """

    loss: Sequence[Row]
    gap: Sequence[Row]
    telemetry: Sequence[Row]


def study_curves(result: StudyResult) -> StudyCurves:
    """Read every run's metrics once and average over seeds."""
    loss: list[Row] = []
    gap: list[Row] = []
    telemetry: list[Row] = []
    base = {seed: run_curves(run) for seed, run in result.baseline.runs.items()}
    for arm in result.arms:
        is_base = arm.name == result.study.baseline
        curves = base if is_base else {seed: run_curves(run) for seed, run in arm.runs.items()}
        training = [c.training for c in curves.values()]
        heldout = [c.heldout for c in curves.values()]
        loss += _band(arm.name, "training", training) + _band(arm.name, "held-out", heldout)
        telemetry += _telemetry_rows(arm.name, list(curves.values()))
        if not is_base:
            paired = {seed: curves[seed] for seed in arm.gaps} or curves  # as in the verdict
            gap += _gap_rows(arm.name, paired, base, result.study.confidence)
    return StudyCurves(loss, gap, telemetry)


def run_curves(run: Run) -> RunCurves:
    """The series of one run's metrics.jsonl."""
    curves = RunCurves()
    rows = read_metrics(run.dir)
    steps = [row["step"] for row in rows]
    losses = np.array([row["loss"] for row in rows], dtype=np.float64)
    smoothed = smooth(losses, window=max(1, len(rows) // 40))
    curves.training = {
        s: float(v) for s, v in zip(steps, smoothed, strict=True) if math.isfinite(v)
    }
    for row in rows:
        value = row.get("heldout_loss")
        if value is not None and math.isfinite(value):
            curves.heldout[row["step"]] = float(value)
        for wire, classes in (row.get("telemetry") or {}).items():
            for param_class, measures in classes.items():
                _add_measures(curves, row["step"], wire, param_class, measures)
    return curves


def smooth(values: np.ndarray, window: float) -> np.ndarray:
    """Exponential moving average of about `window` values, without the pull towards 0 at its start.

    values: float64 [n] → float64 [n]; from the first value that is not finite on, not finite.
    """
    keep = 1 - 1 / window
    result = np.empty_like(values)
    total = weight = 0.0
    for i, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        result[i] = total / weight
    return result


def thin(steps: Iterable[int], points: int = POINTS) -> list[int]:
    """At most `points` of `steps`, evenly spread, with the first and the last."""
    ordered = sorted(steps)
    if len(ordered) <= points:
        return ordered
    places = np.linspace(0, len(ordered) - 1, points).round().astype(int)
    return [ordered[i] for i in places]


def final_telemetry(rows: Sequence[Row]) -> list[Row]:
    """Each arm, wire and parameter class: its measures averaged over the telemetry steps."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["wire"], row["param_class"]), []).append(row)
    means = []
    for (arm, wire, param_class), group in groups.items():
        mean: Row = {"arm": arm, "wire": wire, "param_class": param_class}
        for measure in MEASURES:
            values = [row[measure] for row in group if row.get(measure) is not None]
            mean[measure] = float(np.mean(values)) if values else None
        means.append(mean)
    return means


def _add_measures(
    curves: RunCurves, step: int, wire: str, param_class: str, measures: Mapping[str, Any]
) -> None:
    for measure in MEASURES:
        value = measures.get(measure)
        if value is not None and math.isfinite(value):
            curves.telemetry.setdefault((wire, param_class, measure), {})[step] = float(value)


def _band(arm: str, series: str, runs: Sequence[Points]) -> list[Row]:
    rows = []
    for step in thin({step for points in runs for step in points}):
        values = [points[step] for points in runs if step in points]
        row = {"mean": float(np.mean(values)), "low": min(values), "high": max(values)}
        rows.append({"arm": arm, "series": series, "step": step, **row})
    return rows


def _gap_rows(
    arm: str, curves: Mapping[int, RunCurves], base: Mapping[int, RunCurves], confidence: float
) -> list[Row]:
    by_step: dict[int, list[float]] = {}
    for seed in sorted(curves.keys() & base.keys()):
        theirs = base[seed].heldout
        for step, value in curves[seed].heldout.items():
            if step in theirs:
                by_step.setdefault(step, []).append(value - theirs[step])
    rows = []
    for step in thin(by_step):
        values = by_step[step]
        mean = float(np.mean(values))
        spread = len(values) > 1 and np.ptp(values) > 0
        low, high = t_interval(values, confidence) if spread else (mean, mean)
        rows.append({"arm": arm, "step": step, "mean": mean, "low": low, "high": high})
    return rows


def _telemetry_rows(arm: str, curves: Sequence[RunCurves]) -> list[Row]:
    values: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for run in curves:
        for (wire, param_class, measure), points in run.telemetry.items():
            for step, value in points.items():
                cell = values.setdefault((wire, param_class, step), {})
                cell.setdefault(measure, []).append(value)
    kept = set(thin({step for _, _, step in values}, 50))
    return [
        {"arm": arm, "wire": wire, "param_class": param_class, "step": step}
        | {measure: float(np.mean(v)) for measure, v in cell.items()}
        for (wire, param_class, step), cell in sorted(values.items())
        if step in kept
    ]
