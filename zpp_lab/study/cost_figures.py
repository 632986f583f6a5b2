"""The figures of the final gaps against what an arm costs: bytes sent, or measured speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from zpp_lab.study.band import one_seed
from zpp_lab.study.curves import Row
from zpp_lab.study.figure_rows import (
    PANEL,
    cost_rows,
    ends,
    front_rows,
    lone_bands,
    margin_rows,
    names,
    speed_rows,
)
from zpp_lab.study.gap_figures import GAP, NOISE, Spec, gap_tooltip, margin_layers
from zpp_lab.study.style import GapAxis, Style, beside, chart, finish
from zpp_lab.study.verdict import StudyResult


def bytes_figure(result: StudyResult, style: Style) -> Spec:
    """Gap against the bytes of a step, over all links and between nodes, with the Pareto front."""
    rows = style.dress(cost_rows(result))
    panels: list[Any] = []
    data: dict[str, Sequence[Row]] = {}
    for key, where in _links(rows).items():
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


def _links(rows: Sequence[Row]) -> dict[str, str]:
    """The panels: one where all bytes go between nodes, as between single GPUs."""
    if all(row["bytes_total"] == row["bytes_inter"] for row in rows):
        return {"bytes_inter": "all between nodes"}
    return {"bytes_total": "all links", "bytes_inter": "between nodes"}


def speed_figure(
    result: StudyResult, speeds: Mapping[str, Mapping[str, float]], style: Style
) -> Spec:
    """Gap against measured tokens/s, one panel a bandwidth, with the Pareto front."""
    panels: list[Any] = []
    data: dict[str, Sequence[Row]] = {}
    for number, (bandwidth, measured) in enumerate(speeds.items()):
        key = f"speed{number}"
        rows = [row | {key: row["speed"]} for row in speed_rows(result, measured)]
        fastest = max(row[key] for row in rows)
        x = alt.X(
            f"{key}:Q",
            title=f"Tokens/s, {bandwidth}",
            scale=alt.Scale(domain=[0, 1.1 * fastest], nice=False),  # 2 % shall look like 2 %
            axis=alt.Axis(format="~s", tickCount=6),
        )
        panel, more = _cost_panel(result, style, style.dress(rows), key, x, sign=-1)
        panels.append(panel)
        data |= more
    return finish(beside(panels, 2), data, side=70, legend=110)


def _cost_panel(
    result: StudyResult, style: Style, rows: Sequence[Row], key: str, x: alt.X, sign: int = 1
) -> tuple[Any, dict[str, Sequence[Row]]]:
    """(panel, its data). sign: −1 where more of `key` is better. With one seed the noise band is
    drawn and no front: gaps inside the noise have no order."""
    assert result.margin is not None
    gaps = GapAxis.around(result.margin, *ends(rows))
    y: dict[str, Any] = {"scale": gaps.scale, "axis": gaps.axis(PANEL[1]), "title": GAP}
    best = [] if one_seed(result) else front_rows(result, rows, key, sign)
    noise = lone_bands(result).get(result.study.baseline)
    channel: Any = x.to_dict()
    start, end = channel["scale"]["domain"]
    fronts = [row["arm"] for row in best]
    named = sorted(
        (row for row in rows if row["look"] == row["arm"]), key=lambda r: r["arm"] not in fronts
    )
    layers = [
        *margin_layers("y", gaps, GAP, PANEL[1], f"{key}_margin"),
        *([_noise(f"{key}_noise", y)] if noise else []),
        *([_front(f"{key}_front", x, y, sign)] if best else []),
        *_points(key, rows, style, x, y),
        _names(key, channel["title"], y),
    ]
    data: dict[str, Sequence[Row]] = {
        key: rows,
        f"{key}_names": names(named, key, (start, end), gaps),
        f"{key}_margin": margin_rows(result.margin),
    }
    data |= {f"{key}_noise": [{"low": -noise, "high": noise}]} if noise else {}
    data |= {f"{key}_front": best} if best else {}
    return alt.layer(*layers).properties(width=PANEL[0], height=PANEL[1]), data


def _noise(data: str, y: dict[str, Any]) -> alt.Chart:
    rect = chart(data, by_arm=False).mark_rect(**NOISE)
    return rect.encode(y=alt.Y("low:Q", **y), y2="high:Q")


def _front(data: str, x: alt.X, y: dict[str, Any], sign: int) -> alt.Chart:
    step: Any = "step-after" if sign > 0 else "step-before"
    line = chart(data, by_arm=False).mark_line(
        interpolate=step, color="#111827", strokeWidth=1.2, strokeDash=[5, 3], clip=True
    )
    return line.encode(x=x, y=alt.Y("mean:Q", **y))


def _points(
    key: str, rows: Sequence[Row], style: Style, x: alt.X, y: dict[str, Any]
) -> list[alt.Chart]:
    """Intervals and means."""
    base = chart(key).encode(x=x, color=style.color(rows, legend=False))
    return [
        base.mark_rule(strokeWidth=1.5, clip=True).encode(y=alt.Y("low:Q", **y), y2="high:Q"),
        base.mark_point(size=80, filled=True, opacity=1).encode(
            y=alt.Y("mean:Q", **y),
            shape=style.shape(list({row["verdict"] for row in rows})),
            tooltip=gap_tooltip(),
        ),
    ]


def _names(key: str, title: str, y: dict[str, Any]) -> alt.Chart:
    labels = chart(f"{key}_names").mark_text(
        align="left", fontSize=10.5, color="#374151", invalid="filter"
    )
    return labels.encode(x=alt.X("x:Q", title=title), y=alt.Y("y:Q", **y), text="arm:N").properties(
        name=f"names_{key}"
    )
