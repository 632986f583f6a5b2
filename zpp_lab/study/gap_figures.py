"""The figures of the final gaps: arm by arm, and against what an arm costs in bytes or in speed.

Gaps lie on an axis that is linear around 0 and logarithmic beyond, so that a negative control
and a gap within the margin are both readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from zpp_lab.study.curves import Row
from zpp_lab.study.figure_rows import (
    PANEL,
    cost_rows,
    ends,
    front_rows,
    gap_rows,
    margin_rows,
    names,
    seed_rows,
    speed_rows,
)
from zpp_lab.study.style import BAND, GREY, GapAxis, Style, beside, chart, finish
from zpp_lab.study.verdict import StudyResult

Spec = dict[str, Any]
GAP = "Held-out loss gap (nats per token)"
_WIDTH = 520  # pixels of the gap figure
_MANY = 24  # arms from which their rows are lower


def gap_figure(result: StudyResult, style: Style) -> Spec:
    """Every arm's mean gap with its intervals, its seeds and its margin."""
    assert result.margin is not None
    rows = style.dress(gap_rows(result))
    gaps = GapAxis.around(result.margin, *ends(rows))
    order = [arm.name for arm in result.arms]
    y = alt.Y("arm:N", sort=order, title=None, axis=_ARMS)
    x: dict[str, Any] = {"scale": gaps.scale, "axis": gaps.axis}
    x["title"] = f"Held-out loss gap to {result.compared_with} (nats per token)"
    color = style.color(rows, legend=False)
    base = chart("arms").encode(y=y, color=color, tooltip=_gap_tooltip())
    band = chart("arms").mark_bar(color=BAND, opacity=0.8, height=alt.RelativeBandSize(1))
    zero = chart("margin", by_arm=False).mark_rule(color=GREY, strokeDash=[3, 3])
    outer = base.mark_rule(strokeWidth=2, clip=True)
    inner = base.mark_rule(strokeWidth=6, opacity=0.55, clip=True)
    point = base.mark_point(size=90, filled=True, opacity=1, stroke="white", strokeWidth=1)
    seeds = chart("seeds").mark_tick(thickness=1.2, size=7, opacity=0.9, yOffset=10, clip=True)
    text = base.mark_text(align="left", fontSize=11)
    many = len(rows) > _MANY
    layers = [
        band.encode(y=y, x=alt.X("from:Q", **x), x2="to:Q"),
        zero.encode(x=alt.X("zero:Q", **x)),
        outer.encode(x=alt.X("low:Q", **x), x2="high:Q"),
        inner.encode(x=alt.X("inner_low:Q", **x), x2="inner_high:Q"),
        *([] if many else [seeds.encode(x=alt.X("gap:Q", **x), y=y, color=color)]),
        point.encode(
            x=alt.X("mean:Q", **x), shape=style.shape([r["verdict"] for r in rows], False)
        ),
        text.encode(
            x=alt.value(_WIDTH + 12), text="label:N", color=alt.value("#111827")
        ).properties(name="beside"),
    ]
    made = alt.layer(*layers).properties(width=_WIDTH, height=alt.Step(20 if many else 38))
    marks = {} if many else {"seeds": style.dress(seed_rows(result))}
    data = {"arms": rows, "margin": margin_rows(result.margin), **marks}
    longest = max(len(row["arm"]) for row in rows)
    return finish(made, data, side=30 + 7 * longest, legend=210)


def bytes_figure(result: StudyResult, style: Style) -> Spec:
    """Gap against the bytes of a step, over all links and between nodes, with the Pareto front."""
    rows = style.dress(cost_rows(result))
    panels: list[Any] = []
    data: dict[str, Sequence[Row]] = {}
    for key, where in {"bytes_total": "all links", "bytes_inter": "between nodes"}.items():
        known = [row for row in rows if row[key] is not None]
        if len(known) < 2:  # a single node sends nothing between nodes
            continue
        x = alt.X(
            f"{key}:Q",
            title=f"Bytes per step, {where} (% of {result.compared_with})",
            scale=alt.Scale(domain=[0, max(row[key] for row in known) * 1.06], nice=False),
            axis=alt.Axis(format=".0%", tickCount=6),
        )
        panel, more = _cost_panel(result, style, known, key, x)
        panels.append(panel)
        data |= more
    return finish(beside(panels, 2), data, side=70, legend=110)


def speed_figure(
    result: StudyResult, speeds: Mapping[str, Mapping[str, float]], style: Style
) -> Spec:
    """Gap against measured tokens/s, one panel a bandwidth, with the Pareto front."""
    panels: list[Any] = []
    data: dict[str, Sequence[Row]] = {}
    for number, (bandwidth, measured) in enumerate(speeds.items()):
        key = f"speed{number}"
        rows = [row | {key: row["speed"]} for row in speed_rows(result, measured)]
        fastest, slowest = (pick(row[key] for row in rows) for pick in (max, min))
        room = 0.08 * (fastest - slowest) or 0.1 * fastest
        x = alt.X(
            f"{key}:Q",
            title=f"Tokens/s, {bandwidth}",
            scale=alt.Scale(domain=[slowest - room, fastest + room], nice=False),
            axis=alt.Axis(format="~s", tickCount=6),
        )
        panel, more = _cost_panel(result, style, style.dress(rows), key, x, sign=-1)
        panels.append(panel)
        data |= more
    return finish(beside(panels, 2), data, side=70, legend=110)


def _cost_panel(
    result: StudyResult, style: Style, rows: Sequence[Row], key: str, x: alt.X, sign: int = 1
) -> tuple[Any, dict[str, Sequence[Row]]]:
    """(panel, its data). sign: −1 where more of `key` is better."""
    assert result.margin is not None
    gaps = GapAxis.around(result.margin, *ends(rows))
    y: dict[str, Any] = {"scale": gaps.scale, "axis": gaps.axis, "title": GAP}
    best = front_rows(result, rows, key, sign)
    channel: Any = x.to_dict()
    start, end = channel["scale"]["domain"]
    fronts = [row["arm"] for row in best]
    named = sorted(
        (row for row in rows if row["look"] == row["arm"]), key=lambda r: r["arm"] not in fronts
    )
    base = chart(key).encode(x=x, color=style.color(rows, legend=False))
    interval = base.mark_rule(strokeWidth=1.5, clip=True)
    point = base.mark_point(size=80, filled=True, opacity=1)
    step: Any = "step-after" if sign > 0 else "step-before"
    line = chart(f"{key}_front", by_arm=False).mark_line(
        interpolate=step, color="#111827", strokeWidth=1.2, strokeDash=[5, 3], clip=True
    )
    labels = chart(f"{key}_names").mark_text(
        align="left", fontSize=10.5, color="#374151", invalid="filter"
    )
    layers = [
        *margin_layers("y", gaps, GAP, f"{key}_margin"),
        line.encode(x=x, y=alt.Y("mean:Q", **y)),
        interval.encode(y=alt.Y("low:Q", **y), y2="high:Q"),
        point.encode(
            y=alt.Y("mean:Q", **y),
            shape=style.shape(list({row["verdict"] for row in rows})),
            tooltip=_gap_tooltip(),
        ),
        labels.encode(
            x=alt.X("x:Q", title=channel["title"]), y=alt.Y("y:Q", **y), text="arm:N"
        ).properties(name=f"names_{key}"),
    ]
    data = {
        key: rows,
        f"{key}_front": best,
        f"{key}_names": names(named, key, (start, end), gaps),
        f"{key}_margin": margin_rows(result.margin),
    }
    return alt.layer(*layers).properties(width=PANEL[0], height=PANEL[1]), data


def margin_layers(channel: str, gaps: GapAxis, title: str, data: str = "margin") -> list[Any]:
    """The shaded margin and the line at 0; they come first, below the rows."""
    kind: Any = alt.X if channel == "x" else alt.Y
    look = {"scale": gaps.scale, "axis": gaps.axis, "title": title}
    band = {channel: kind("from:Q", **look), f"{channel}2": "to:Q"}
    zero = {channel: kind("zero:Q", **look)}
    return [
        chart(data, by_arm=False).mark_rect(color=BAND, opacity=0.8).encode(**band),
        chart(data, by_arm=False).mark_rule(color=GREY, strokeDash=[3, 3]).encode(**zero),
    ]


_ARMS = alt.Axis(grid=False, ticks=False, labelPadding=8, labelLimit=260)


def _gap_tooltip() -> list[Any]:
    return [
        "arm:N",
        "verdict:N",
        alt.Tooltip("mean:Q", title="mean gap", format="+.5f"),
        alt.Tooltip("low:Q", title="from", format="+.5f"),
        alt.Tooltip("high:Q", title="to", format="+.5f"),
        alt.Tooltip("bytes_total:Q", title="bytes, all links", format=".1%"),
        alt.Tooltip("bytes_inter:Q", title="bytes between nodes", format=".1%"),
        alt.Tooltip("seeds:Q"),
    ]
