"""The figures of measured speed: speed-up and share of the floor over the bandwidth of the links.

Both axes of the speed-up are logarithmic: twice as fast and half as fast lie as far from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from zpp_lab.study.report.figures.curves import Row
from zpp_lab.study.report.figures.gap import Spec
from zpp_lab.study.report.sections import Figure
from zpp_lab.study.report.speed.contents import SpeedFindings
from zpp_lab.study.report.style import GREY, Style, chart, finish, legend_pick, quantities
from zpp_lab.study.speed.results import BASE, Measured, Setting
from zpp_lab.study.speed.speeds import SpeedUp

_TEXTS = {
    "speedup": (
        "Speed-up over the strongest plain FSDP2",
        "Tokens per second over those of the strongest plain arm of the same call and link, "
        "measured. Points: the median step; upright lines: the slowest and the fastest step over "
        "its median; joined "
        "as the break-even is interpolated. Above the dashed line: faster. Links without a limit "
        "lie where they were measured.",
    ),
    "floor": (
        "Share of the floor reached",
        "Floor: the larger one of the time that the link needs for a step's bytes and of a step "
        "without any communication. 100%: all of the smaller one, and nothing else, is hidden.",
    ),
}
SPEED_NAMES = tuple(_TEXTS)
_QUANTITIES = {  # of a point that is held
    "rate": ("tokens/s", ",.0f"),
    "value": ("speed-up", ".3f"),
    "low": ("slowest step", ".3f"),
    "high": ("fastest step", ".3f"),
    "share": ("of the floor", ".1%"),
}
_PREDICTED = " Dotted: what the cost model predicts, over its own strongest plain arm."
_GREY = " Coloured: plain FSDP2 and the arms that reach the largest speed-ups; the others are grey."
_SHARED = (
    " Of settings with several ranks a GPU: nodes shared GPUs, so computing took as many times "
    "longer than on a GPU a rank, at the same links."
)
HIGHLIGHTED = 5  # arms with a colour of their own: more lines cannot be followed
_SIZE = 355, 300  # pixels of a panel
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TIMES = "format(datum.value, '~g') + '×'"
_BANDWIDTH = "Bandwidth between nodes (Gb/s)"


def highlighted(found: SpeedFindings) -> list[str]:
    """Return the base and the arms of the largest speed-ups, HIGHLIGHTED in all."""
    best: dict[str, float] = {}
    for one in found.ups:
        best[one.at.arm] = max(one.value, best.get(one.at.arm, 0.0))
    others = sorted((arm for arm in found.arms if arm != BASE), key=lambda arm: -best.get(arm, 0.0))
    return [BASE, *others][:HIGHLIGHTED]


def make_speed_figures(found: SpeedFindings, style: Style) -> list[Figure]:
    """Return those that there are measurements for, in SPEED_NAMES' order."""
    linked = _link_rows(found)
    faster, reached = _having(linked, "value"), _having(linked, "share")
    specs: dict[str, Spec] = {}
    if faster:
        specs["speedup"] = _speedup(faster, _predicted_rows(found), found.names, style)
    if reached:
        specs["floor"] = _floor(reached, found.names, style)
    texts = dict(_TEXTS)
    if found.predicted:
        texts["speedup"] = (texts["speedup"][0], texts["speedup"][1] + _PREDICTED)
    for name in ("speedup", "floor"):
        if len(found.arms) > HIGHLIGHTED:
            texts[name] = (texts[name][0], texts[name][1] + _GREY)
    more = _SHARED if any(setting.ranks_per_gpu > 1 for setting in found.names) else ""
    return [
        Figure(name, texts[name][0], texts[name][1] + more, spec) for name, spec in specs.items()
    ]


def _link_rows(found: SpeedFindings) -> dict[Setting, list[Row]]:
    """Measurements with a bandwidth, by setting; `value` (low, high) is the speed-up, None where
    there is no base; `share` is that of the floor."""
    ups = {id(one.at): one for one in found.ups}
    rows: dict[Setting, list[Row]] = {}
    for m in found.measured:
        if m.gbps is not None:
            rows.setdefault(m.setting, []).append(_row(m, ups.get(id(m))))
    return {setting: sorted(group, key=lambda r: r["gbps"]) for setting, group in rows.items()}


def _predicted_rows(found: SpeedFindings) -> dict[Setting, list[Row]]:
    """Predicted speed-ups over the strongest predicted plain arm, by setting."""
    plain = {(m.setting, m.arm) for m in found.measured if m.plain}
    bases: dict[tuple[Setting, float | None], float] = {}
    for p in found.predicted:
        if (p.setting, p.arm) in plain:
            at = p.setting, p.gbps
            bases[at] = max(p.tokens_per_s, bases.get(at, 0.0))
    rows: dict[Setting, list[Row]] = {}
    for p in sorted(found.predicted, key=lambda p: p.gbps or 0.0):
        base = bases.get((p.setting, p.gbps))
        if base is not None and p.gbps is not None:
            row = {"arm": p.arm, "gbps": p.gbps, "value": p.tokens_per_s / base}
            rows.setdefault(p.setting, []).append(row | {"rate": p.tokens_per_s})
    return rows


def _row(m: Measured, up: SpeedUp | None) -> Row:
    return {
        "arm": m.arm,
        "link": m.place,
        "gbps": m.gbps,
        "rate": m.tokens_per_s,
        "value": up and up.value,
        "low": up and up.low,
        "high": up and up.high,
        "share": m.share_of_floor,
    }


def _having(rows: Mapping[Setting, Sequence[Row]], name: str) -> dict[Setting, list[Row]]:
    chosen = {s: [row for row in group if row[name] is not None] for s, group in rows.items()}
    return {s: group for s, group in chosen.items() if len({row["arm"] for row in group}) > 1}


def _speedup(
    rows: Mapping[Setting, Sequence[Row]],
    predicted: Mapping[Setting, Sequence[Row]],
    names: Mapping[Setting, str],
    style: Style,
) -> Spec:
    every = [row for s in rows for row in [*rows[s], *predicted.get(s, ())]]
    low = min(row.get("low") or row["value"] for row in every)
    high = max(row.get("high") or row["value"] for row in every)
    domain = [min(low, 0.95) / 1.08, max(high, 1.05) * 1.08]
    ticks = [tick for tick in _TICKS if domain[0] <= tick <= domain[1]]
    y = alt.Y(
        "value:Q",
        title="Speed-up over the strongest plain FSDP2",
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(values=ticks, labelExpr=_TIMES),
    )
    return _panels(rows, names, style, y, "value", predicted, rule=1.0)


def _floor(
    rows: Mapping[Setting, Sequence[Row]], names: Mapping[Setting, str], style: Style
) -> Spec:
    top = max(1.0, *(row["share"] for group in rows.values() for row in group))
    y = alt.Y(
        "share:Q",
        title="Share of the floor reached",
        scale=alt.Scale(domain=[0, 1.04 * top], nice=False),
        axis=alt.Axis(format=".0%", tickCount=6),
    )
    return _panels(rows, names, style, y, "share", {}, rule=1.0)


def _panels(
    rows: Mapping[Setting, Sequence[Row]],
    names: Mapping[Setting, str],
    style: Style,
    y: alt.Y,
    field: str,
    predicted: Mapping[Setting, Sequence[Row]],
    rule: float,
) -> Spec:
    """A panel a setting, `field` over the bandwidth, with one legend for all."""
    dressed = {s: style.dress(group) for s, group in rows.items()}
    every = [row for group in dressed.values() for row in group]
    color, shape = _arm_channels(style, every)
    pick = legend_pick()
    panels: list[Any] = []
    data: dict[str, Sequence[Row]] = {"rule": [{"at": rule}]}
    for number, (setting, group) in enumerate(dressed.items()):
        name, more = f"links{number}", f"predicted{number}"
        x = _bandwidths([*group, *predicted.get(setting, ())])
        base = chart(name).encode(x=x, color=color, detail="arm:N")
        seen = alt.condition(pick, alt.value(1), alt.value(0.1))
        line = base.mark_line(strokeWidth=1.8, opacity=1).encode(y=y, opacity=seen)
        point = base.mark_point(size=70, filled=True, opacity=1).encode(
            y=y, shape=shape, opacity=seen, tooltip=["arm:N", "link:N", *quantities(_QUANTITIES)]
        )
        at_rule = alt.Y("at:Q", **_same(y))
        layers = [
            chart("rule", by_arm=False).mark_rule(color=GREY, strokeDash=[4, 3]).encode(y=at_rule),
            line,
            *([_spread(base, y, seen)] if field == "value" else []),
            *([_dotted(more, x, y, color)] if setting in predicted else []),
            point if panels else point.add_params(pick),
        ]
        panel = alt.layer(*layers).properties(width=_SIZE[0], height=_SIZE[1])
        panels.append(panel.properties(title=names[setting]))
        data[name] = group
        if setting in predicted:
            data[more] = style.dress(predicted[setting])
    longest = max(len(row["look"]) for row in every)
    made = alt.concat(*panels, columns=2)
    return finish(made, data, side=62, legend=45 + 7 * min(30, longest))


def _spread(base: alt.Chart, y: alt.Y, seen: Any) -> alt.Chart:
    low = alt.Y("low:Q", **_same(y))
    return base.mark_rule(strokeWidth=2).encode(y=low, y2="high:Q", opacity=seen)


def _dotted(data: str, x: alt.X, y: alt.Y, color: alt.Color) -> alt.Chart:
    mark = chart(data).mark_line(strokeWidth=1.6, strokeDash=[1.5, 3], clip=True)
    return mark.encode(x=x, y=y, color=color, detail="arm:N")


def _same(channel: Any) -> dict[str, Any]:
    """Scale, axis and title of a channel, for another field of its layers."""
    own = channel.to_dict()
    return {name: own[name] for name in ("scale", "axis", "title")}


def _bandwidths(rows: Sequence[Row]) -> alt.X:
    known = sorted({float(f"{row['gbps']:.3g}") for row in rows if "link" in row})
    ends = [row["gbps"] for row in rows]
    low, high = min(ends) / 1.15, max(ends) * 1.15
    steps = [c * 10.0**k for k in range(-2, 5) for c in (1, 2, 5)]
    free = [s for s in steps if low <= s <= high and all(max(s / k, k / s) > 1.4 for k in known)]
    return alt.X(
        "gbps:Q",
        title=_BANDWIDTH,
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(values=sorted([*known, *free]), format="~g", labelOverlap="greedy"),
    )


def _arm_channels(style: Style, rows: Sequence[Row]) -> tuple[alt.Color, alt.Shape]:
    """Colour and shape by arm, in one legend: neither has to be told apart alone."""
    shown = style.shown(rows)
    legend = alt.Legend(labelLimit=220, symbolSize=70, symbolOpacity=1)
    colors = alt.Scale(domain=shown, range=[style.colors[look] for look in shown])
    marks = [_SHAPES[i % len(_SHAPES)] for i, _ in enumerate(shown)]
    shapes = alt.Scale(domain=shown, range=marks)
    return (
        alt.Color("look:N", title="Arm", scale=colors, legend=legend),
        alt.Shape("look:N", title="Arm", scale=shapes, legend=legend),
    )
