"""The figures over training: loss, gap, and what the codecs did to the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from zpp_lab.config import WIRES
from zpp_lab.study.curves import Row
from zpp_lab.study.figure_rows import ends, margin_rows
from zpp_lab.study.gap_figures import GAP, Spec, margin_layers
from zpp_lab.study.style import GREY, GapAxis, Style, chart, finish

CLASSES = ("embedding", "attention", "mlp", "norm", "head", "other")
STEP_GAP = "Training loss gap, smoothed (nats per token)"
_LOSS = "Loss (nats per token)"
_STEPS = alt.Axis(tickCount=5, format="~s", labelFlush=True)
_HEADER = alt.Header(labelExpr="split(datum.value, ' · ')", labelLineHeight=13)
_LOG = ("nmse", "error_angle")  # measures on a logarithmic axis


def loss_figure(rows: Sequence[Row], style: Style) -> Spec:
    """Training and held-out loss over steps, with the range of the seeds."""
    start = [row["high"] for row in rows if row["arm"] == style.baseline]
    top = max(start or [row["high"] for row in rows]) * 1.05
    bottom = min(row["low"] for row in rows)
    scale = alt.Scale(domain=[bottom - 0.03 * (top - bottom), top], nice=False)
    y = {"scale": scale, "title": _LOSS}
    dressed = style.dress(rows)
    data = {
        "training": [row for row in dressed if row["series"] == "training"],
        "heldout": [row for row in dressed if row["series"] == "held-out"],
    }
    titles = {"training": "Training loss (smoothed)", "heldout": "Held-out loss"}
    pick = _pick()
    panels: list[Any] = []
    for name, values in data.items():
        if values:
            band, line = _lines(name, dressed, style, pick, y, points=name == "heldout")
            line = line if panels else line.add_params(pick)  # once for all panels
            panel = alt.layer(band, line).properties(width=330, height=310, title=titles[name])
            panels.append(panel)
    shown = {name: _bare(values) for name, values in data.items() if values}
    return finish(alt.concat(*panels, columns=2), shown, side=62, legend=_legend(dressed))


def gap_curves_figure(
    rows: Sequence[Row],
    margin: float,
    style: Style,
    noise: Sequence[Row] = (),
    title: str = GAP,
    points: bool = True,
) -> Spec:
    """A loss minus the baseline's over training; `noise` has the ends of the noise band."""
    dressed, pick = style.dress(rows), _pick()
    low, high = ends(rows)
    widest = max((row["high"] for row in noise), default=0.0)
    gaps = GapAxis.around(margin, min(low, -widest), max(high, widest))
    y = {"scale": gaps.scale, "axis": gaps.axis, "title": title}
    band, line = _lines("gaps", dressed, style, pick, y, points)
    layers = [*margin_layers("y", gaps, title), *_noise(noise, dressed, y)]
    made = alt.layer(*layers, band, line.add_params(pick)).properties(width=690, height=320)
    data = {"gaps": dressed, "margin": margin_rows(margin)} | ({"noise": noise} if noise else {})
    return finish(made, data, side=70, legend=_legend(dressed))


def _noise(noise: Sequence[Row], dressed: Sequence[Row], y: dict[str, Any]) -> list[alt.Chart]:
    if not noise:
        return []
    area = chart("noise", by_arm=False).mark_area(
        color=GREY, fillOpacity=0.25, stroke=GREY, strokeWidth=1, strokeDash=[3, 2], clip=True
    )
    return [area.encode(x=_over_steps(dressed), y=alt.Y("low:Q", **y), y2="high:Q")]


def telemetry_figure(rows: Sequence[Row], measure: str, style: Style) -> Spec:
    """One measure of the codecs' errors over training, a panel a wire and parameter class.

    cosine is drawn as its distance from 1, on which differences show.
    """
    field, title = ("error_angle", "1 − cosine") if measure == "cosine" else (measure, measure)
    shown = [_measured(row, measure, field) for row in rows if row.get(measure) is not None]
    shown = [row for row in shown if field not in _LOG or row[field] > 0]
    if not shown:
        return {}
    dressed, pick = style.dress(shown), _pick()
    panels = [f"{wire} · {kind}" for wire in WIRES for kind in CLASSES]
    log, columns = field in _LOG, len({row["panel"].split(" · ")[1] for row in shown})
    tooltip = ["arm:N", "panel:N", "step:Q", alt.Tooltip(f"{field}:Q", format=".3g")]
    made = (
        chart("telemetry")
        .mark_line(strokeWidth=1.6, point=alt.OverlayMarkDef(size=14, filled=True))
        .encode(
            x=alt.X("step:Q", title="Step", axis=alt.Axis(tickCount=3, format="~s")),
            y=alt.Y(
                f"{field}:Q",
                scale=alt.Scale(type="log") if log else alt.Scale(zero=True),
                title="NMSE" if measure == "nmse" else title,
                axis=alt.Axis(format=".0e" if log else ".2~g", tickCount=4),
            ),
            color=style.color(dressed),
            strokeDash=style.dash(dressed),
            opacity=alt.condition(pick, alt.value(1), alt.value(0.08)),
            detail="arm:N",
            tooltip=tooltip,
        )
        .properties(width=min(150, 840 // columns - 12), height=105)
        .add_params(pick)
        .facet(facet=alt.Facet("panel:N", sort=panels, title=None, header=_HEADER), columns=columns)
    )
    return finish(made, {"telemetry": dressed}, side=48, legend=_legend(dressed))


def _measured(row: Row, measure: str, field: str) -> Row:
    value = 1 - row[measure] if measure == "cosine" else row[measure]
    panel = f"{row['wire']} · {row['param_class']}"
    return {"arm": row["arm"], "panel": panel, "step": row["step"], field: value}


def _lines(
    data: str,
    dressed: Sequence[Row],
    style: Style,
    pick: alt.Parameter,
    y: dict[str, Any],
    points: bool,
) -> tuple[alt.Chart, alt.Chart]:
    """(bands from low to high, mean lines) over steps, coloured as all of `dressed`.

    y: scale, title and axis. Layers share an axis, so all of them must name the same title.
    """
    base = chart(data).encode(x=_over_steps(dressed), color=style.color(dressed), detail="arm:N")
    band = base.mark_area(clip=True).encode(
        y=alt.Y("low:Q", **y),
        y2="high:Q",
        opacity=alt.condition(pick, alt.value(0.13), alt.value(0.02)),
    )
    mark = alt.OverlayMarkDef(size=22, filled=True) if points else False
    line = base.mark_line(clip=True, strokeWidth=1.8, point=mark).encode(
        y=alt.Y("mean:Q", **y),
        strokeDash=style.dash(dressed),
        opacity=alt.condition(pick, alt.value(1), alt.value(0.1)),
        tooltip=["arm:N", "step:Q", alt.Tooltip("mean:Q", format=".5f")],
    )
    return band, line


def _over_steps(dressed: Sequence[Row]) -> alt.X:
    last = max(row["step"] for row in dressed)
    scale = alt.Scale(domain=[0, 1.02 * last], nice=False)
    return alt.X("step:Q", title="Step", scale=scale, axis=_STEPS)


def _bare(rows: Sequence[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "series"} for row in rows]


def _pick() -> alt.Parameter:
    """A click on an arm in the legend singles it out."""
    return alt.selection_point(name="pick", fields=["look"], bind="legend")


def _legend(rows: Sequence[Row]) -> int:
    """About the legend's width in pixels."""
    return 45 + 7 * min(30, max(len(row["look"]) for row in rows))
