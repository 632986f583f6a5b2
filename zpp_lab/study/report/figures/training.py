"""The figures over training: loss, gap, and what the codecs did to the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from zpp_lab.config.wires import WIRES
from zpp_lab.study.report.figures.curves import Row
from zpp_lab.study.report.figures.gap import GAP, NOISE, Spec, ends, margin_layers, margin_rows
from zpp_lab.study.report.style import GapAxis, Style, chart, finish, legend_pick

CLASSES = ("embedding", "attention", "mlp", "norm", "head", "other")
STEP_GAP = "Training loss gap (nats per token)"
BANDED = 8  # arms whose bands can be read in one panel
_HEIGHT = 320  # pixels of the gap figures' panel
_LOSS = "Loss (nats per token)"
_STEPS = alt.Axis(tickCount=5, format="~s", labelFlush=True)
_HEADER = alt.Header(labelExpr="split(datum.value, ' · ')", labelLineHeight=13)
_LOG = ("nmse", "error_angle")  # measures on a logarithmic axis


def loss_figure(rows: Sequence[Row], style: Style) -> Spec:
    """Return training and held-out loss over steps, each on its own axis. One arm, the baseline
    where it has run, shows the range of its seeds: the ranges of all would be one band."""
    start = [row["high"] for row in rows if row["arm"] == style.baseline]
    top = max(start or [row["high"] for row in rows])
    # the baseline below: arms that lie on it show in its line, with their dashes
    dressed = sorted(style.dress(rows), key=lambda row: row["arm"] != style.baseline)
    data = {
        "training": [row for row in dressed if row["series"] == "training"],
        "heldout": [row for row in dressed if row["series"] == "held-out"],
    }
    alone = style.baseline if start else dressed[0]["arm"]
    titles = {"training": "Training loss (smoothed)", "heldout": "Held-out loss"}
    pick = legend_pick()
    panels: list[Any] = []
    for name, values in data.items():
        if values:
            y = {"scale": _losses(values, top), "title": _LOSS}
            band, line = _lines(name, dressed, style, pick, y, points=name == "heldout")
            band = band.transform_filter(alt.datum.arm == alone)
            line = line if panels else line.add_params(pick)  # once for all panels
            panel = alt.layer(band, line).properties(width=330, height=310, title=titles[name])
            panels.append(panel)
    shown = {name: _bare(values) for name, values in data.items() if values}
    return finish(alt.concat(*panels, columns=2), shown, side=62, legend=_legend(dressed))


def _losses(rows: Sequence[Row], top: float) -> alt.Scale:
    """All that the rows reach, but nothing above `top`, where the baseline starts."""
    bottom, top = min(row["low"] for row in rows), min(top, max(row["high"] for row in rows))
    free = 0.04 * (top - bottom) or 0.1
    return alt.Scale(domain=[bottom - free, top + free], nice=False)


def gap_figure_over_steps(
    rows: Sequence[Row], margin: float, style: Style, noise: Sequence[Row], title: str
) -> Spec:
    """Plot a loss minus the baseline's over training. noise: the ends of the noise band."""
    if len({row["arm"] for row in rows}) > BANDED:  # so many bands would cover each other
        rows = [row | {"low": row["mean"], "high": row["mean"]} for row in rows]
    dressed, pick = style.dress(list(rows)), legend_pick()
    low, high = ends(dressed)
    widest = max((row["high"] for row in noise), default=0.0)
    gaps = GapAxis.around(margin, min(low, -widest), max(high, widest))
    y = {"scale": gaps.scale, "axis": gaps.axis(_HEIGHT), "title": title}
    band, line = _lines("gaps", dressed, style, pick, y, points=title == GAP)
    below = [*margin_layers("y", gaps, title, _HEIGHT), *_noise(noise, dressed, y)]
    made = alt.layer(*below, band, line.add_params(pick)).properties(width=690, height=_HEIGHT)
    data: dict[str, Sequence[Row]] = {"gaps": _bare(dressed), "margin": margin_rows(margin)}
    data |= {"noise": noise} if noise else {}
    return finish(made, data, side=70, legend=_legend(dressed))


def _noise(noise: Sequence[Row], dressed: Sequence[Row], y: dict[str, Any]) -> list[alt.Chart]:
    if not noise:
        return []
    area = chart("noise", by_arm=False).mark_area(**NOISE)
    return [area.encode(x=_over_steps(dressed), y=alt.Y("low:Q", **y), y2="high:Q")]


def telemetry_figure(rows: Sequence[Row], measure: str, style: Style) -> Spec:
    """Return one measure of the codecs' errors over training, a panel a wire and parameter class.

    cosine is drawn as its distance from 1, on which differences show.
    """
    field, title = ("error_angle", "1 − cosine") if measure == "cosine" else (measure, measure)
    shown = [_measured(row, measure, field) for row in rows if row.get(measure) is not None]
    shown = [row for row in shown if field not in _LOG or row[field] > 0]
    if not shown:
        return {}
    dressed, pick = style.dress(shown), legend_pick()
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


def _legend(rows: Sequence[Row]) -> int:
    """About the legend's width in pixels."""
    return 65 + 7 * min(42, max(len(row["look"]) for row in rows))
