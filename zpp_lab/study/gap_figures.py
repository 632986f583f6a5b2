"""The figure of the final gaps, arm by arm, and what all figures of gaps share.

Gaps lie on an axis that is linear around 0 and logarithmic beyond, so that a negative control
and a gap within the margin are both readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from zpp_lab.study.curves import Row
from zpp_lab.study.figure_rows import ends, gap_rows, margin_rows, seed_rows
from zpp_lab.study.style import BAND, GREY, GapAxis, Style, chart, finish
from zpp_lab.study.verdict import StudyResult

Spec = dict[str, Any]
GAP = "Held-out loss gap (nats per token)"
NOISE: dict[str, Any] = {  # the look of a noise band
    **{"color": GREY, "fillOpacity": 0.25, "clip": True},
    **{"stroke": GREY, "strokeWidth": 1, "strokeDash": [3, 2]},
}
_WIDTH, _ON_PHONE = 520, 210  # pixels of the gap figure
_MANY = 24  # arms from which their rows are lower
_NAME = 260  # pixels of an arm's name, at most
_ARMS = alt.Axis(grid=False, ticks=False, labelPadding=8, labelLimit=_NAME)


def gap_figure(result: StudyResult, style: Style) -> Spec:
    """Every arm's mean gap with its intervals, its seeds and its margin; with one seed, which has
    no intervals, the noise band."""
    assert result.margin is not None
    rows = style.dress(gap_rows(result))
    gaps = GapAxis.around(result.margin, *ends(rows))
    y = alt.Y("arm:N", sort=[arm.name for arm in result.arms], title=None, axis=_ARMS)
    x: dict[str, Any] = {"scale": gaps.scale, "axis": gaps.axis(_WIDTH, across=True)}
    x["title"] = f"Held-out loss gap to {result.compared_with} (nats per token)"
    many, lone = len(rows) > _MANY, all(row["seeds"] == 1 for row in rows)
    layers = [*_below(rows, y, x), *_marks(rows, style, y, x, not many and not lone)]
    made = alt.layer(*layers).properties(width=_WIDTH, height=alt.Step(20 if many else 38))
    marks = {} if many or lone else {"seeds": style.dress(seed_rows(result))}
    data = {"arms": rows, "margin": margin_rows(result.margin), **marks}
    longest = min(_NAME, 7 * max(len(row["arm"]) for row in rows))
    spec = finish(made, data, side=30 + longest, legend=235 if lone else 210)
    spec["usermeta"]["narrow"] = gaps.ticks(_ON_PHONE, across=True)
    return spec


def _below(rows: Sequence[Row], y: alt.Y, x: Mapping[str, Any]) -> list[Any]:
    """The margin of each arm, its noise band where there is one, and the line at 0."""
    whole = alt.RelativeBandSize(1)
    band = chart("arms").mark_bar(color=BAND, opacity=0.8, height=whole)
    zero = chart("margin", by_arm=False).mark_rule(color=GREY, strokeDash=[3, 3])
    return [
        band.encode(y=y, x=alt.X("from:Q", **x), x2="to:Q"),
        *_noise(rows, y, x),
        zero.encode(x=alt.X("zero:Q", **x)),
    ]


def _noise(rows: Sequence[Row], y: alt.Y, x: Mapping[str, Any]) -> list[Any]:
    """One band over all rows where they share it, else each row's own."""
    widths = {row.get("noise_to") for row in rows}
    if widths == {None}:
        return []
    ends = {"x": alt.X("noise_from:Q", **x), "x2": "noise_to:Q"}
    if len(widths) == 1:
        one = chart("arms", by_arm=False).transform_window(row="row_number()")
        return [one.transform_filter("datum.row == 1").mark_rect(**NOISE).encode(**ends)]
    whole = alt.RelativeBandSize(1)
    return [chart("arms").mark_bar(height=whole, invalid="filter", **NOISE).encode(y=y, **ends)]


def _marks(
    rows: Sequence[Row], style: Style, y: alt.Y, x: Mapping[str, Any], seeds: bool
) -> list[Any]:
    """Intervals, single seeds, means and the words beside them."""
    color = style.color(rows, legend=None)
    base = chart("arms").encode(y=y, color=color, tooltip=gap_tooltip())
    outer = base.mark_rule(strokeWidth=2, clip=True)
    inner = base.mark_rule(strokeWidth=6, opacity=0.55, clip=True)
    point = base.mark_point(size=90, filled=True, opacity=1, stroke="white", strokeWidth=1)
    ticks = chart("seeds").mark_tick(thickness=1.2, size=7, opacity=0.9, yOffset=10, clip=True)
    text = base.mark_text(align="left", fontSize=11)
    return [
        outer.encode(x=alt.X("low:Q", **x), x2="high:Q"),
        inner.encode(x=alt.X("inner_low:Q", **x), x2="inner_high:Q"),
        *([ticks.encode(x=alt.X("gap:Q", **x), y=y, color=color)] if seeds else []),
        point.encode(
            x=alt.X("mean:Q", **x), shape=style.shape([r["verdict"] for r in rows], False)
        ),
        text.encode(
            x=alt.value(_WIDTH + 12), text="label:N", color=alt.value("#111827")
        ).properties(name="beside"),
    ]


def margin_layers(
    channel: str, gaps: GapAxis, title: str, length: float, data: str = "margin"
) -> list[Any]:
    """The shaded margin and the line at 0; they come first, below the rows. length: the panel's
    pixels along the axis."""
    kind: Any = alt.X if channel == "x" else alt.Y
    look = {"scale": gaps.scale, "axis": gaps.axis(length, channel == "x"), "title": title}
    band = {channel: kind("from:Q", **look), f"{channel}2": "to:Q"}
    zero = {channel: kind("zero:Q", **look)}
    return [
        chart(data, by_arm=False).mark_rect(color=BAND, opacity=0.8).encode(**band),
        chart(data, by_arm=False).mark_rule(color=GREY, strokeDash=[3, 3]).encode(**zero),
    ]


def gap_tooltip() -> list[Any]:
    """What a point of a final gap says when it is held."""
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
