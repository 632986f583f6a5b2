"""Curves over training, averaged over an arm's seeds and thinned out for display.

The verdict never reads these: smoothing and thinning are for the eye only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from zpp_lab.runs.reader import Run, read_metrics
from zpp_lab.study.judge.noise import heldout_band, mean_points, training_band
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import ArmResult, StudyResult

POINTS = 150  # a curve's points in a figure, at most
_FEWEST, _ROWS = 24, 3000  # a curve's points, at least; rows of all curves of a kind, about
_TELEMETRY_ROWS = 4000
SERIES = ("training", "held-out")
MEASURES = ("nmse", "bias", "cosine", "saturated", "zeroed")
Row = dict[str, Any]
Points = dict[int, float]  # step → value


@dataclass
class RunCurves:
    """One run's series by step. Values that are not finite are left out. Of a run with rewards both
    are shares of failures: its loss says nothing of success."""

    training: Points = field(default_factory=dict)  # smoothed losses, nats per token
    heldout: Points = field(default_factory=dict)  # nats per token
    telemetry: dict[tuple[str, str, str], Points] = field(default_factory=dict)

    def of(self, series: str) -> Points:
        return self.training if series == "training" else self.heldout


@dataclass(frozen=True)
class StudyCurves:
    """Tidy rows for the figures; every row has arm and step.

    loss: series (training, held-out), mean, low, high (lowest and highest seed).
    gap: held-out loss minus the baseline's; mean, low, high (confidence interval of the mean).
    steps: training loss (smoothed) minus the baseline's; mean, low, high (lowest, highest seed).
    noise: "training", "held-out" → low, high: how far the order controls stray.
    telemetry: wire, param_class and one column a measure (mean over seeds); the row of step 0
    is the mean over all steps.
    """

    loss: Sequence[Row]
    gap: Sequence[Row]
    telemetry: Sequence[Row]
    steps: Sequence[Row] = ()
    noise: Mapping[str, Sequence[Row]] = field(default_factory=dict)


def study_curves(result: StudyResult, detailed: Collection[str] | None = None) -> StudyCurves:
    """Read every run's metrics once and average over seeds.

    detailed: the arms whose telemetry has steps; the others' is one mean row each (step 0), for
    tables. None: all. At most two arms' runs are in memory at a time.
    """
    # of one curve, so that a page with many arms stays small
    points = max(_FEWEST, min(POINTS, _ROWS // max(1, len(result.arms))))
    detailed = {arm.name for arm in result.arms} if detailed is None else detailed
    loss: list[Row] = []
    gap: list[Row] = []
    steps: list[Row] = []
    telemetry: list[Row] = []
    strayed: dict[str, list[Points]] = {series: [] for series in SERIES}
    by_base: dict[str, list[ArmResult]] = {}
    for arm in result.arms:
        by_base.setdefault(result.baseline_of(arm).name, []).append(arm)
    for name, arms in by_base.items():
        base = _read(next(arm for arm in result.arms if arm.name == name))
        repeats = [arm for arm in arms if arm.arm.role == "baseline_repeat"]
        means = {seed: _mean(own, seed, repeats) for seed, own in base.items()}
        for arm in arms:
            curves = base if arm.name == name else _read(arm)
            for series in SERIES:
                loss += _band(arm.name, series, [c.of(series) for c in curves.values()], points)
            telemetry += _telemetry_rows(arm.name, list(curves.values()), arm.name in detailed)
            if arm.verdict != "baseline":
                paired = {seed: curves[seed] for seed in arm.gaps} or curves  # as in the verdict
                gap += _gap_rows(arm.name, paired, means, result.study.confidence, points)
                gaps = gaps_by_step(paired, means, "training")
                steps += _band(arm.name, "training", gaps, points)
                if arm.arm.role == "order_control":
                    strayed["training"] += gaps
                    strayed["held-out"] += gaps_by_step(paired, means, "held-out")
    most = max(2, _TELEMETRY_ROWS // max(1, _groups(telemetry, detailed)))
    noise = {
        "training": training_band(strayed["training"], {row["step"] for row in steps}),
        "held-out": heldout_band(strayed["held-out"], {row["step"] for row in gap}),
    }
    thinned = _thin_telemetry(telemetry, detailed, min(50, most))
    return StudyCurves(loss, gap, thinned, steps, noise)


def gaps_by_step(
    curves: Mapping[int, RunCurves], base: Mapping[int, RunCurves], series: str
) -> list[Points]:
    """Return each seed's loss minus the baseline's of that seed, at the steps of both."""
    return [
        {step: v - theirs[step] for step, v in curves[seed].of(series).items() if step in theirs}
        for seed in sorted(curves.keys() & base.keys())
        for theirs in [base[seed].of(series)]
    ]


def _mean(own: RunCurves, seed: int, repeats: Sequence[ArmResult]) -> RunCurves:
    """Of a baseline's run and its finished repeats, at the steps that all have."""
    runs = [arm.runs[seed] for arm in repeats if seed in arm.runs]
    every = [own, *(run_curves(run) for run in runs if run.outcome == "finished")]
    if len(every) == 1:
        return own
    training, heldout = (dict(mean_points([one.of(series) for one in every])) for series in SERIES)
    return RunCurves(training, heldout)


def _read(arm: ArmResult) -> dict[int, RunCurves]:
    return {seed: run_curves(run) for seed, run in arm.runs.items()}


def run_curves(run: Run) -> RunCurves:
    """Return the series of one run's metrics.jsonl."""
    curves = RunCurves()
    rows = read_metrics(run.dir)
    losses = np.array(
        [1 - row["rl"]["success"] if "rl" in row else row["loss"] for row in rows], np.float64
    )
    smoothed = smooth(losses, window=max(1, len(rows) // 40)).tolist() if rows else []
    curves.training = {
        row["step"]: v for row, v in zip(rows, smoothed, strict=True) if math.isfinite(v)
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
    """Return exponential moving average of about `window` values, without the pull towards 0 at its
    start.

    values: float64 [n] → float64 [n]; from the first value that is not finite on, not finite.
    """
    import pandas as pd  # a second to import

    smoothed = pd.Series(values).ewm(alpha=1 / window).mean().to_numpy(copy=True)
    lost = np.flatnonzero(~np.isfinite(values))
    if lost.size:
        smoothed[lost[0] :] = np.nan
    return smoothed


def thin(steps: Iterable[int], points: int = POINTS) -> list[int]:
    """Return at most `points` of `steps`, evenly spread, with the first and the last."""
    ordered = sorted(steps)
    if len(ordered) <= points:
        return ordered
    places = np.linspace(0, len(ordered) - 1, points).round().astype(int)
    return [ordered[i] for i in places]


def _add_measures(
    curves: RunCurves, step: int, wire: str, param_class: str, measures: Mapping[str, Any]
) -> None:
    for measure in MEASURES:
        value = measures.get(measure)
        if value is not None and math.isfinite(value):
            curves.telemetry.setdefault((wire, param_class, measure), {})[step] = float(value)


def _band(arm: str, series: str, runs: Sequence[Points], points: int) -> list[Row]:
    rows = []
    for step in thin({step for run in runs for step in run}, points):
        values = [run[step] for run in runs if step in run]
        row = {"mean": fmean(values), "low": min(values), "high": max(values)}
        rows.append({"arm": arm, "series": series, "step": step, **row})
    return rows


def _gap_rows(
    arm: str,
    curves: Mapping[int, RunCurves],
    base: Mapping[int, RunCurves],
    confidence: float,
    points: int,
) -> list[Row]:
    by_step: dict[int, list[float]] = {}
    for run in gaps_by_step(curves, base, "held-out"):
        for step, value in run.items():
            by_step.setdefault(step, []).append(value)
    rows = []
    for step in thin(by_step, points):
        values = by_step[step]
        mean = fmean(values)
        spread = len(values) > 1 and max(values) > min(values)
        low, high = t_interval(values, confidence) if spread else (mean, mean)
        rows.append({"arm": arm, "step": step, "mean": mean, "low": low, "high": high})
    return rows


def _telemetry_rows(arm: str, curves: Sequence[RunCurves], detailed: bool) -> list[Row]:
    """One row a wire, class and step (step 0: the mean over all steps, for every arm)."""
    values: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for run in curves:
        for (wire, param_class, measure), points in run.telemetry.items():
            for step, value in points.items():
                for at in (0, step) if detailed else (0,):
                    cell = values.setdefault((wire, param_class, at), {})
                    cell.setdefault(measure, []).append(value)
    return [
        {"arm": arm, "wire": wire, "param_class": param_class, "step": step}
        | {measure: fmean(found) for measure, found in cell.items()}
        for (wire, param_class, step), cell in sorted(values.items())
    ]


def _groups(rows: Sequence[Row], detailed: Collection[str]) -> int:
    return len({(r["arm"], r["wire"], r["param_class"]) for r in rows if r["arm"] in detailed})


def _thin_telemetry(rows: Sequence[Row], detailed: Collection[str], steps: int) -> list[Row]:
    by_arm: dict[str, set[int]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], set()).add(row["step"])
    chosen = {arm: {0, *thin(found - {0}, steps)} for arm, found in by_arm.items()}
    return [row for row in rows if row["step"] in chosen[row["arm"]]]
