"""The figure of the final gaps, arm by arm, and what all figures of gaps share.

Shared are the rows, the Pareto front, the margin and its axis. The axis is linear around 0 and
logarithmic beyond, so that a negative control and a gap within the margin are both readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import altair as alt

from zpp_lab.study.judge import claims
from zpp_lab.study.judge.answer import cost
from zpp_lab.study.judge.noise import BandGap, band_gap, noise_bands, one_seed
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.report.figures.curves import Row
from zpp_lab.study.report.style import BAND, GREY, LOOKS, GapAxis, Style, chart, finish, quantities
from zpp_lab.study.words import gap_text, percent

T = TypeVar("T")
Spec = dict[str, Any]
GAP = "Held-out loss gap (nats per token)"
NOISE: dict[str, Any] = {  # the look of a noise band
    **{"color": GREY, "fillOpacity": 0.25, "clip": True},
    **{"stroke": GREY, "strokeWidth": 1, "strokeDash": [3, 2]},
}
ESTIMATE = {"mean": ("mean gap", "+.5f"), "low": ("from", "+.5f"), "high": ("to", "+.5f")}
_SHARES = {
    "bytes_total": ("bytes, all links", ".1%"),
    "bytes_inter": ("bytes between nodes", ".1%"),
}
PANEL = (355, 340)  # pixels of a panel of the cost figures
_WIDTH, _PHONE = 600, 335  # pixels of the gap figure's panel, and of all of it on a phone
_COLUMNS = {"gap": 12, "sent": 132, "label": 200}  # pixels from the rows to the words next to them
_HEADS = {"gap": "Gap ± interval", "sent": "Bytes", "label": "Verdict"}
_NARROW = 0.7  # of the panel: so far a narrow page shrinks it, and its ticks must still fit
_ROWS, _PHONE_ROWS = 500, 440  # pixels of all of its rows, so that it lies within a first screen
_ROW, _SEEDS = (14, 32), 24  # pixels of a row, least and most; from where on seeds have room in it
_PHONE_ROW = (11, 34)
_NAME = 260  # pixels of an arm's name, at most
_SHORT = {  # verdicts next to the rows on a phone
    claims.ABOVE_OPEN: "above 0, open",
    claims.BELOW_OPEN: "below 0, open",
}


def front(points: Sequence[tuple[float, float, T]]) -> list[T]:
    """Return what is not dominated, by rising cost. points: (cost, gap, what), less is better in
    both.

    A point is dominated when another one is no worse in both and better in one. Of points that
    are alike in both, all stay. Points without a number (NaN) are on no front.
    """
    known = sorted((p for p in points if p[0] == p[0] and p[1] == p[1]), key=lambda p: p[:2])
    chosen: list[T] = []
    best = float("inf")
    at = float("nan")
    for price, gap, what in known:
        if gap < best or (gap == best and price == at):
            chosen.append(what)
            best, at = gap, price
    return chosen


def margin_rows(margin: float) -> list[Row]:
    return [{"from": -margin, "to": margin, "zero": 0}]


def gap_rows(result: StudyResult) -> list[Row]:
    """Return one row for each arm, but baselines, that has a gap."""
    arms = [arm for arm in result.every if arm.verdict != "baseline"]
    bands = lone_bands(result)
    return [_gap_row(arm, band_gap(result, arm, bands)) for arm in arms if arm.gap is not None]


def lone_bands(result: StudyResult) -> dict[str, float]:
    """Return the noise bands that figures show in place of intervals, with one seed."""
    return noise_bands(result) if one_seed(result) else {}


def _gap_row(arm: ArmResult, at: BandGap | None) -> Row:
    assert arm.gap is not None
    low, high = arm.gap.shown or (arm.gap.mean, arm.gap.mean)
    margin = arm.margin or 0.0
    short, sent = _SHORT.get(arm.verdict, arm.verdict) if at is None else at.text, cost(arm)
    return {
        "arm": arm.name,
        "verdict": arm.verdict,
        "mean": arm.gap.mean,
        "low": low,
        "high": high,
        "from": -margin,
        "to": margin,
        "bytes_total": arm.bytes_total,
        "bytes_inter": arm.bytes_inter,
        "seeds": arm.gap.n,
        "gap": gap_text(arm),
        "sent": percent(sent),
        "label": arm.verdict if at is None else _placed(arm, at),
        "short": short if sent is None else f"{short} · {percent(sent)}",  # bytes have no column
    } | ({} if at is None else {"noise_from": -at.noise, "noise_to": at.noise})


def _placed(arm: ArmResult, at: BandGap) -> str:
    """Where a lone seed's gap lies, in the words of the tables."""
    if arm.arm.role == "order_control":
        return "sets the noise band"
    return f"{at.side} the noise band, {at.times}"


def cost_rows(result: StudyResult) -> list[Row]:
    """Return `gap_rows` after the baseline's, which is a point of its own on every front."""
    arms = {arm.name for arm in result.arms}  # a composite costs nothing
    rows = [row for row in gap_rows(result) if row["arm"] in arms]
    base = result.baseline
    own: Row = {"arm": base.name, "verdict": "baseline", "seeds": len(base.finished)}
    own |= dict.fromkeys(("mean", "low", "high"), 0.0)
    own |= {"bytes_total": base.bytes_total, "bytes_inter": base.bytes_inter}
    return [own, *rows] if result.margin else []


def speed_rows(result: StudyResult, speeds: Mapping[str, float]) -> list[Row]:
    """Return `cost_rows` of the arms that were measured, with tokens/s."""
    return [
        row | {"speed": speeds[row["arm"]]} for row in cost_rows(result) if row["arm"] in speeds
    ]


def front_rows(result: StudyResult, rows: Sequence[Row], key: str, sign: int = 1) -> list[Row]:
    """Return the rows on the Pareto front of gap and sign × `key`, without controls."""
    controls = {control.arm for control in result.controls}
    points = [
        (sign * row[key], row["mean"], row)
        for row in rows
        if row.get(key) is not None and row["arm"] not in controls
    ]
    return sorted(front(points), key=lambda row: (row[key], row["mean"]))


def telling_arms(result: StudyResult) -> list[str]:
    """Return the arms that get a colour of their own: all when they are few.

    Else the baseline, the arms on the Pareto front of bytes, the controls, then the others in
    the study's order.
    """
    names = [result.study.baseline]
    if len(result.arms) > LOOKS:
        key = "bytes_total" if result.baseline.bytes_inter is None else "bytes_inter"
        fronts = [row["arm"] for row in front_rows(result, cost_rows(result), key)]
        names += [*_spread(fronts, LOOKS - 3), *(control.arm for control in result.controls)]
    names += [arm.name for arm in result.arms]
    return list(dict.fromkeys(names))[:LOOKS]


def seed_rows(result: StudyResult) -> list[Row]:
    return [
        {"arm": arm.name, "seed": seed, "gap": gap}
        for arm in result.every
        if arm.verdict != "baseline" and arm.gap is not None
        for seed, gap in arm.gaps.items()
    ]


def ends(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the range of all means and noise bands, and of intervals unless far wider."""
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


def gap_figure(result: StudyResult, style: Style) -> Spec:
    """Return every arm's mean gap with the interval that decides, its seeds, its margin and its
    verdict, whose colour it has; with one seed, which has no intervals, the noise band."""
    assert result.margin is not None
    rows = style.dress(gap_rows(result))
    gaps = GapAxis.around(result.margin, *ends(rows))
    row, on_phone = (
        max(least, min(most, whole // len(rows)))
        for whole, (least, most) in ((_ROWS, _ROW), (_PHONE_ROWS, _PHONE_ROW))
    )
    axis = alt.Axis(grid=False, ticks=False, labelPadding=8, labelLimit=_NAME, labelOverlap=False)
    whole = alt.Scale(paddingInner=0, paddingOuter=0)  # so that the rows' margins are one band
    y = alt.Y("arm:N", sort=[a.name for a in result.ranked], title=None, axis=axis, scale=whole)
    x: dict[str, Any] = {"scale": gaps.scale, "axis": gaps.axis(_NARROW * _WIDTH, across=True)}
    x["title"] = f"Held-out loss gap to {result.compared_with} (nats per token)"
    seeds = row >= _SEEDS and any(one["seeds"] > 1 for one in rows)
    layers = [*_below(rows, y, x), *_marks(rows, style, y, x, seeds)]
    made = alt.layer(*layers).properties(width=_WIDTH, height=alt.Step(row))
    verdicts = {one["arm"]: one["verdict"] for one in rows}
    colored = [one | {"verdict": verdicts[one["arm"]]} for one in seed_rows(result)]
    marks = {"seeds": colored} if seeds else {}
    data = {"arms": rows, "margin": margin_rows(result.margin), **marks}
    longest = min(_NAME, 7 * max(len(row["arm"]) for row in rows))
    right = _COLUMNS["label"] + 4 + 6 * max(len(row["label"]) for row in rows)
    spec = finish(made, data, side=30 + longest, legend=right)
    font = 11 if on_phone > 13 else 9
    names, words = (
        round(16 + 0.57 * font * max(len(row[key]) for row in rows)) for key in ("arm", "short")
    )
    names = min(names, 16 + _NAME // 2)
    ticks = gaps.ticks(_PHONE - names - words, across=True)
    phone = {"side": names, "beside": words, "ticks": ticks, "row": on_phone, "font": font}
    spec["usermeta"]["phone"] = phone
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
    """Intervals, single seeds, means and the words next to them."""
    verdicts = [row["verdict"] for row in rows]
    color = style.verdict(verdicts)
    base = chart("arms").encode(y=y, color=color, tooltip=gap_tooltip())
    outer = base.mark_rule(strokeWidth=2.5, clip=True)
    point = base.mark_point(size=90, filled=True, opacity=1, stroke="white", strokeWidth=1)
    ticks = chart("seeds").mark_tick(thickness=1.2, size=6, opacity=0.9, yOffset=9, clip=True)
    text = base.mark_text(align="left", fontSize=11)
    return [
        outer.encode(x=alt.X("low:Q", **x), x2="high:Q"),
        *([ticks.encode(x=alt.X("gap:Q", **x), y=y, color=color)] if seeds else []),
        point.encode(x=alt.X("mean:Q", **x), shape=style.shape(verdicts, False)),
        *(
            text.encode(x=alt.value(_WIDTH + at), text=f"{key}:N").properties(name=f"words_{key}")
            for key, at in _COLUMNS.items()
        ),
        *(
            chart("margin", by_arm=False)
            .mark_text(align="left", baseline="bottom", fontSize=11, color=GREY)
            .encode(x=alt.value(_WIDTH + at), y=alt.value(-6), text=alt.value(_HEADS[key]))
            .properties(name=f"head_{key}")
            for key, at in _COLUMNS.items()
        ),
    ]


def margin_layers(
    channel: str, gaps: GapAxis, title: str, length: float, data: str = "margin"
) -> list[Any]:
    """Return the shaded margin and the line at 0. length: pixels along the axis."""
    kind: Any = alt.X if channel == "x" else alt.Y
    look = {"scale": gaps.scale, "axis": gaps.axis(length, channel == "x"), "title": title}
    band = {channel: kind("from:Q", **look), f"{channel}2": "to:Q"}
    zero = {channel: kind("zero:Q", **look)}
    return [
        chart(data, by_arm=False).mark_rect(color=BAND, opacity=0.8).encode(**band),
        chart(data, by_arm=False).mark_rule(color=GREY, strokeDash=[3, 3]).encode(**zero),
    ]


def gap_tooltip() -> list[Any]:
    """Return what a point of a final gap says when it is held."""
    return ["arm:N", "verdict:N", *quantities({**ESTIMATE, **_SHARES}), "seeds:Q"]
