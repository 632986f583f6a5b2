"""The report's figures as Vega-Lite specifications: loss, gap, gap against bytes, codec errors.

Gaps lie on an axis that is linear around 0 and logarithmic beyond, so that a
negative control and a gap within the margin are both readable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from zpp_lab.config import WIRES
from zpp_lab.study.curves import Row, StudyCurves
from zpp_lab.study.figure_rows import (
    PANEL,
    baseline_row,
    ends,
    gap_rows,
    margin_rows,
    names,
    seed_rows,
    top_last,
)
from zpp_lab.study.style import BAND, GREY, GapAxis, Style, finish
from zpp_lab.study.verdict import StudyResult

Spec = dict[str, Any]
_CLASSES = ("embedding", "attention", "mlp", "norm", "head", "other")
_GAP = "Held-out loss gap (nats per token)"
_LOSS = "Loss (nats per token)"
_WIDTH = 560  # pixels of the gap figure
_STEPS = alt.Axis(tickCount=6, format="~s")


def make_figures(result: StudyResult, curves: StudyCurves) -> dict[str, Spec]:
    """Name → Vega-Lite specification, for the figures that the runs have data for."""
    style = Style([arm.name for arm in result.arms], result.study.baseline)
    gaps = gap_rows(result)
    telemetry = [row for row in curves.telemetry if (row.get("nmse") or 0) > 0]
    bytes_known = any(row["bytes_total"] is not None for row in gaps)
    wanted: dict[str, tuple[Any, Callable[[], Spec]]] = {
        "gap": (gaps, lambda: gap_figure(result, style)),
        "loss": (curves.loss, lambda: loss_figure(curves.loss, style)),
        "gap_curves": (
            curves.gap and result.margin,
            lambda: gap_curves_figure(curves.gap, result.margin or 0.0, style),
        ),
        "gap_vs_bytes": (bytes_known, lambda: bytes_figure(result, style)),
        "telemetry": (telemetry, lambda: telemetry_figure(telemetry, style)),
    }
    return {name: make() for name, (data, make) in wanted.items() if data}


def gap_figure(result: StudyResult, style: Style) -> Spec:
    """Every arm's mean gap with its intervals, its seeds and the margin."""
    assert result.margin is not None
    rows = gap_rows(result)
    gaps = GapAxis.around(result.margin, *ends(rows))
    scale, color = gaps.scale, style.color(legend=False)
    order = [row["arm"] for row in rows]
    y_axis = alt.Axis(grid=False, ticks=False, labelPadding=8)
    y = alt.Y("arm:N", sort=order, title=None, axis=y_axis)
    title = f"Held-out loss gap to {result.study.baseline} (nats per token)"
    base = _chart("arms").encode(y=y, color=color, tooltip=_gap_tooltip())
    outer = base.mark_rule(strokeWidth=2, clip=True).encode(
        x=alt.X("low:Q", scale=scale, axis=gaps.axis, title=title), x2="high:Q"
    )
    inner = base.mark_rule(strokeWidth=6, opacity=0.55, clip=True).encode(
        x=alt.X("inner_low:Q", scale=scale), x2="inner_high:Q"
    )
    point = base.mark_point(size=90, filled=True, opacity=1, stroke="white", strokeWidth=1).encode(
        x=alt.X("mean:Q", scale=scale),
        shape=style.shape([row["verdict"] for row in rows], legend=False),
    )
    ticks = (
        _chart("seeds")
        .mark_tick(thickness=1.2, size=7, opacity=0.9, yOffset=10, clip=True)
        .encode(
            x=alt.X("gap:Q", scale=scale), y=y, color=color, tooltip=["arm:N", "seed:O", "gap:Q"]
        )
    )
    text = base.mark_text(align="left", fontSize=11).encode(
        x=alt.value(_WIDTH + 12), text="label:N", color=alt.value("#111827")
    )
    layers = [*_margin_layers("x", gaps), outer, inner, ticks, point, text]
    chart = alt.layer(*layers).properties(width=_WIDTH, height=alt.Step(40))
    seeds = seed_rows(result)
    return finish(chart, {"arms": rows, "seeds": seeds, "margin": margin_rows(result.margin)})


def loss_figure(rows: Sequence[Row], style: Style) -> Spec:
    """Training and held-out loss over steps, with the range of the seeds."""
    pick = _pick()
    start = [row["high"] for row in rows if row["arm"] == style.baseline]
    top = max(start or [row["high"] for row in rows]) * 1.05
    bottom = min(row["low"] for row in rows)
    scale = alt.Scale(domain=[bottom - 0.03 * (top - bottom), top], nice=False)
    y = {"scale": scale, "title": _LOSS}
    data = {
        "training": [row for row in rows if row["series"] == "training"],
        "heldout": [row for row in rows if row["series"] == "held-out"],
    }
    last = max(row["step"] for row in rows)
    arms = sorted({row["arm"] for row in rows})

    def panel(name: str, title: str) -> Any:
        band, line = _lines(name, style, pick, y, last, points=name == "heldout", arms=arms)
        line = line.add_params(pick) if name == "training" else line  # once for both panels
        return alt.layer(band, line).properties(width=355, height=310, title=title)

    chart = alt.hconcat(
        panel("training", "Training loss (smoothed)"), panel("heldout", "Held-out loss")
    )
    return finish(chart, {name: top_last(values, style) for name, values in data.items()})


def gap_curves_figure(rows: Sequence[Row], margin: float, style: Style) -> Spec:
    """Held-out loss minus the baseline's, over training."""
    pick = _pick()
    gaps = GapAxis.around(margin, *ends(rows))
    y = {"scale": gaps.scale, "axis": gaps.axis, "title": _GAP}
    arms = sorted({row["arm"] for row in rows})
    last = max(row["step"] for row in rows)
    band, line = _lines("gaps", style, pick, y, last, points=True, arms=arms)
    layers = [*_margin_layers("y", gaps), band, line.add_params(pick)]
    chart = alt.layer(*layers).properties(width=720, height=320)
    return finish(chart, {"gaps": rows, "margin": margin_rows(margin)})


def bytes_figure(result: StudyResult, style: Style) -> Spec:
    """Gap against the bytes of a step, over all links and between nodes."""
    assert result.margin is not None
    rows = [row for row in gap_rows(result) if row["bytes_total"] is not None]
    gaps = GapAxis.around(result.margin, *ends(rows))
    rows.insert(0, baseline_row(result))
    titles = {"bytes_total": "all links", "bytes_inter": "between nodes"}
    data: dict[str, Sequence[Row]] = {"margin": margin_rows(result.margin)}
    panels = []
    for key, where in titles.items():
        known = [row for row in rows if row[key] is not None]
        if len(known) < 2:  # a single node sends nothing between nodes
            continue
        end = max(row[key] for row in known) * 1.06
        data |= {key: known, f"{key}_names": names(known, key, end, gaps)}
        verdicts = [row["verdict"] for row in rows]
        panels.append(_bytes_panel(key, f"Bytes per step, {where}", end, gaps, style, verdicts))
    return finish(alt.hconcat(*panels), data)


def telemetry_figure(rows: Sequence[Row], style: Style) -> Spec:
    """Normalized squared error of each wire's codec by parameter class, over training."""
    pick = _pick()
    arms = sorted({row["arm"] for row in rows})
    tooltip = ["arm:N", "wire:N", "param_class:N", "step:Q", alt.Tooltip("nmse:Q", format=".3g")]
    y_axis = alt.Axis(format=".0e", tickCount=4)
    chart = (
        _chart("telemetry")
        .mark_line(strokeWidth=1.6, point=alt.OverlayMarkDef(size=14, filled=True))
        .encode(
            x=alt.X("step:Q", title="Step", axis=alt.Axis(tickCount=3, format="~s")),
            y=alt.Y("nmse:Q", scale=alt.Scale(type="log"), title="NMSE", axis=y_axis),
            color=style.color(arms),
            strokeDash=style.dash(arms),
            opacity=alt.condition(pick, alt.value(1), alt.value(0.08)),
            tooltip=tooltip,
        )
        .properties(width=125, height=105)
        .add_params(pick)
        .facet(
            row=alt.Row("wire:N", sort=list(WIRES), title=None),
            column=alt.Column("param_class:N", sort=list(_CLASSES), title=None),
        )
    )
    return finish(chart, {"telemetry": rows})


def _lines(
    data: str,
    style: Style,
    pick: alt.Parameter,
    y: dict[str, Any],
    last: int,
    points: bool,
    arms: Sequence[str] | None = None,
) -> tuple[alt.Chart, alt.Chart]:
    """(bands from low to high, mean lines) over steps up to `last`.

    y: scale, title and axis. Layers share an axis, so all of them must name the same title.
    """
    x = alt.X("step:Q", title="Step", scale=alt.Scale(domain=[0, last]), axis=_STEPS)
    base = _chart(data).encode(x=x, color=style.color(arms))
    band = base.mark_area(clip=True).encode(
        y=alt.Y("low:Q", **y),
        y2="high:Q",
        opacity=alt.condition(pick, alt.value(0.11), alt.value(0.02)),
    )
    mark = alt.OverlayMarkDef(size=22, filled=True) if points else False
    line = base.mark_line(clip=True, strokeWidth=1.8, point=mark).encode(
        y=alt.Y("mean:Q", **y),
        strokeDash=style.dash(arms),
        opacity=alt.condition(pick, alt.value(1), alt.value(0.1)),
        tooltip=["arm:N", "step:Q", alt.Tooltip("mean:Q", format=".5f")],
    )
    return band, line


def _bytes_panel(
    key: str, title: str, end: float, gaps: GapAxis, style: Style, verdicts: Sequence[str]
) -> Any:
    """One panel; its data are named `key` (points) and `key`_names (labels)."""
    scale, x_title = gaps.scale, f"{title} (% of {style.baseline})"
    x_scale = alt.Scale(domain=[0, end], nice=False)
    x_axis = alt.Axis(format=".0%", tickCount=6)
    x = alt.X(f"{key}:Q", title=x_title, scale=x_scale, axis=x_axis)
    base = _chart(key).encode(x=x, color=style.color(legend=False))
    interval = base.mark_rule(strokeWidth=1.5, clip=True).encode(
        y=alt.Y("low:Q", scale=scale, axis=gaps.axis, title=_GAP), y2="high:Q"
    )
    point = base.mark_point(size=80, filled=True, opacity=1).encode(
        y=alt.Y("mean:Q", scale=scale, axis=gaps.axis, title=_GAP),
        shape=style.shape(verdicts),
        tooltip=_gap_tooltip(),
    )
    labels = (
        _chart(f"{key}_names")
        .mark_text(align="left", fontSize=10.5, color="#374151")
        .encode(
            x=alt.X("x:Q", title=x_title), y=alt.Y("y:Q", scale=scale, title=_GAP), text="arm:N"
        )
    )
    layers = [*_margin_layers("y", gaps), interval, point, labels]
    return alt.layer(*layers).properties(width=PANEL[0], height=PANEL[1])


def _chart(data: str) -> alt.Chart:
    """A chart on the rows called `data`; `finish` adds the rows."""
    return alt.Chart(alt.NamedData(name=data))


def _pick() -> alt.Parameter:
    """A click on an arm in the legend singles it out."""
    return alt.selection_point(name="pick", fields=["arm"], bind="legend")


def _margin_layers(channel: str, gaps: GapAxis) -> list[alt.Chart]:
    """The shaded margin and the line at 0; they come first, below the data."""
    kind: Any = alt.X if channel == "x" else alt.Y
    look = {"scale": gaps.scale, "axis": gaps.axis}
    band = {channel: kind("from:Q", **look), f"{channel}2": "to:Q"}
    zero = {channel: kind("zero:Q", **look)}
    return [
        _chart("margin").mark_rect(color=BAND, opacity=0.8).encode(**band),
        _chart("margin").mark_rule(color=GREY, strokeDash=[3, 3]).encode(**zero),
    ]


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
