"""The rows behind the gap figures: an arm's gap with its intervals, its cost and its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zpp_lab.study.band import Beside, beside, noise_bands, one_seed
from zpp_lab.study.curves import Row
from zpp_lab.study.palette import TOLD
from zpp_lab.study.pareto import front
from zpp_lab.study.table import gap_text
from zpp_lab.study.verdict import ArmResult, StudyResult

PANEL = (355, 340)  # pixels of a panel of the cost figures


def margin_rows(margin: float) -> list[Row]:
    return [{"from": -margin, "to": margin, "zero": 0}]


def gap_rows(result: StudyResult) -> list[Row]:
    """One row for each arm, but baselines, that has a gap."""
    arms = [arm for arm in result.arms if arm.verdict != "baseline"]
    bands = lone_bands(result)
    return [_gap_row(arm, beside(result, arm, bands)) for arm in arms if arm.gap is not None]


def lone_bands(result: StudyResult) -> dict[str, float]:
    """The noise bands that figures of final gaps show: with one seed, in place of intervals."""
    return noise_bands(result) if one_seed(result) else {}


def _gap_row(arm: ArmResult, at: Beside | None) -> Row:
    assert arm.gap is not None
    low, high = arm.gap.interval or (arm.gap.mean, arm.gap.mean)
    inner_low, inner_high = arm.gap.inner or (arm.gap.mean, arm.gap.mean)
    margin = arm.margin or 0.0
    return {
        "arm": arm.name,
        "verdict": arm.verdict,
        "mean": arm.gap.mean,
        "low": low,
        "high": high,
        "inner_low": inner_low,
        "inner_high": inner_high,
        "from": -margin,
        "to": margin,
        "bytes_total": arm.bytes_total,
        "bytes_inter": arm.bytes_inter,
        "seeds": arm.gap.n,
        "label": f"{gap_text(arm)}  {arm.verdict if at is None else _placed(arm, at)}",
    } | ({} if at is None else {"noise_from": -at.noise, "noise_to": at.noise})


def _placed(arm: ArmResult, at: Beside) -> str:
    """Where a lone seed's gap lies, in the words of the tables."""
    if arm.arm.role == "order_control":
        return "sets the noise band"
    return f"{at.side} the noise band, {at.times}"


def baseline_row(result: StudyResult) -> Row:
    base = result.baseline
    row: Row = {"arm": base.name, "verdict": "baseline", "seeds": len(base.finished)}
    row |= dict.fromkeys(("mean", "low", "high"), 0.0)
    return row | {"bytes_total": base.bytes_total, "bytes_inter": base.bytes_inter}


def cost_rows(result: StudyResult) -> list[Row]:
    """`gap_rows` after the baseline's, which is a point of its own on every front."""
    return [baseline_row(result), *gap_rows(result)] if result.margin else []


def speed_rows(result: StudyResult, speeds: Mapping[str, float]) -> list[Row]:
    """`cost_rows` of the arms that were measured, with tokens/s."""
    return [
        row | {"speed": speeds[row["arm"]]} for row in cost_rows(result) if row["arm"] in speeds
    ]


def front_rows(result: StudyResult, rows: Sequence[Row], key: str, sign: int = 1) -> list[Row]:
    """The rows on the Pareto front of the gap and sign × the cost `key`; controls are on none."""
    controls = {control.arm for control in result.controls}
    points = [
        (sign * row[key], row["mean"], row)
        for row in rows
        if row.get(key) is not None and row["arm"] not in controls
    ]
    return sorted(front(points), key=lambda row: (row[key], row["mean"]))


def telling_arms(result: StudyResult) -> list[str]:
    """The arms that get a colour of their own: all when they are few.

    Else the baseline, the arms on the Pareto front of bytes, the controls, then the others in
    the study's order.
    """
    names = [result.study.baseline]
    if len(result.arms) > TOLD:
        key = "bytes_total" if result.baseline.bytes_inter is None else "bytes_inter"
        fronts = [row["arm"] for row in front_rows(result, cost_rows(result), key)]
        names += [*_spread(fronts, TOLD - 3), *(control.arm for control in result.controls)]
    names += [arm.name for arm in result.arms]
    return list(dict.fromkeys(names))[:TOLD]


def seed_rows(result: StudyResult) -> list[Row]:
    return [
        {"arm": arm.name, "seed": seed, "gap": gap}
        for arm in result.arms
        if arm.verdict != "baseline" and arm.gap is not None
        for seed, gap in arm.gaps.items()
    ]


def ends(rows: Sequence[Row]) -> tuple[float, float]:
    """The range that shows every mean and noise band, and intervals unless they are far wider than
    all means."""
    low, high = min(row["mean"] for row in rows), max(row["mean"] for row in rows)
    reach = 3 * max(abs(low), abs(high))
    low = min(low, max(-reach, min(row["low"] for row in rows)))
    high = max(high, min(reach, max(row["high"] for row in rows)))
    noise = max((row.get("noise_to", 0.0) for row in rows), default=0.0)
    return min(low, -noise), max(high, noise)


def _spread(items: Sequence[str], count: int) -> list[str]:
    """At most `count` of the items, evenly spread, with both ends."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
