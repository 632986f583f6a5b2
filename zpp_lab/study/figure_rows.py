"""The rows behind the gap figures: an arm's gap with its intervals, bytes and label."""

from __future__ import annotations

from collections.abc import Sequence

from zpp_lab.study.curves import Row
from zpp_lab.study.labels import place
from zpp_lab.study.style import GapAxis, Style
from zpp_lab.study.table import gap_text
from zpp_lab.study.verdict import ArmResult, StudyResult

PANEL = (355, 340)  # pixels of a panel of the bytes figure


def margin_rows(margin: float) -> list[Row]:
    return [{"from": -margin, "to": margin, "zero": 0}]


def gap_rows(result: StudyResult) -> list[Row]:
    """One row for each arm, but the baseline, that has a gap."""
    arms = [arm for arm in result.arms if arm.name != result.study.baseline]
    return [_gap_row(arm) for arm in arms if arm.gap is not None]


def _gap_row(arm: ArmResult) -> Row:
    assert arm.gap is not None
    low, high = arm.gap.interval or (arm.gap.mean, arm.gap.mean)
    inner_low, inner_high = arm.gap.inner or (arm.gap.mean, arm.gap.mean)
    return {
        "arm": arm.name,
        "verdict": arm.verdict,
        "mean": arm.gap.mean,
        "low": low,
        "high": high,
        "inner_low": inner_low,
        "inner_high": inner_high,
        "bytes_total": arm.bytes_total,
        "bytes_inter": arm.bytes_inter,
        "seeds": arm.gap.n,
        "label": f"{gap_text(arm)}  {arm.verdict}",
    }


def baseline_row(result: StudyResult) -> Row:
    base = result.baseline
    row: Row = {"arm": base.name, "verdict": "baseline", "seeds": len(base.finished)}
    row |= dict.fromkeys(("mean", "low", "high"), 0.0)
    return row | {"bytes_total": base.bytes_total, "bytes_inter": base.bytes_inter}


def seed_rows(result: StudyResult) -> list[Row]:
    return [
        {"arm": arm.name, "seed": seed, "gap": gap}
        for arm in result.arms
        if arm.name != result.study.baseline
        for seed, gap in arm.gaps.items()
    ]


def ends(rows: Sequence[Row]) -> tuple[float, float]:
    """The range that shows every mean, and intervals unless they are far wider than all means."""
    low, high = min(row["mean"] for row in rows), max(row["mean"] for row in rows)
    reach = 3 * max(abs(low), abs(high))
    low = min(low, max(-reach, min(row["low"] for row in rows)))
    return low, max(high, min(reach, max(row["high"] for row in rows)))


def top_last(rows: Sequence[Row], style: Style) -> list[Row]:
    """The baseline's rows last, so that its line is drawn on top of the others."""
    return sorted(rows, key=lambda row: row["arm"] == style.baseline)


def names(rows: Sequence[Row], key: str, end: float, gaps: GapAxis) -> list[Row]:
    """The arms' names with the places of their labels, in the axes' units."""
    width, height = PANEL
    points = [(row[key] / end * width, gaps.place(row["mean"]) * height) for row in rows]
    arms = [row["arm"] for row in rows]
    return [
        {"arm": name, "x": x / width * end, "y": gaps.value(y / height)}
        for name, (x, y) in zip(arms, place(points, arms, width, height), strict=True)
    ]
