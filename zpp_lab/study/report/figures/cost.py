"""The figures of the final gaps against what an arm costs: bytes sent, or measured speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import altair as alt

from zpp_lab.study.judge.noise import one_seed
from zpp_lab.study.judge.verdict import StudyResult
from zpp_lab.study.report.figures.curves import Row
from zpp_lab.study.report.figures.gap import (
    GAP,
    NOISE,
    PANEL,
    Spec,
    cost_rows,
    ends,
    front_rows,
    gap_tooltip,
    lone_bands,
    margin_layers,
    margin_rows,
    speed_rows,
)
from zpp_lab.study.report.style import POINTS, GapAxis, Style, beside, chart, finish, legend_pick


@dataclass(frozen=True)
class _Panel:
    """One panel: the cost's field in its dressed rows, and its axis. sign: −1 where more of the
    cost is better."""

    key: str
    rows: Sequence[Row]
    x: alt.X
    sign: int = 1


def bytes_figure(result: StudyResult, style: Style) -> Spec:
    """Gap against the bytes of a step, over all links and between nodes, with the Pareto front."""
    rows = style.dress(cost_rows(result))
    panels = []
    for key, where in _links(rows).items():
        known = [row for row in rows if row[key] is not None]
        if len(known) < 2:  # a single node sends nothing between nodes
            continue
        x = alt.X(
            f"{key}:Q",
            title=f"Bytes per step, {where} (% of the baseline's)",
            scale=alt.Scale(domain=[0, max(row[key] for row in known) * 1.06], nice=False),
            axis=alt.Axis(format=".0%", tickCount=6),
        )
        panels.append(_Panel(key, known, x))
    return _figure(result, style, panels)


def _links(rows: Sequence[Row]) -> dict[str, str]:
    """The panels: one where all bytes go between nodes, as between single GPUs."""
    if all(row["bytes_total"] == row["bytes_inter"] for row in rows):
        return {"bytes_inter": "all between nodes"}
    return {"bytes_total": "all links", "bytes_inter": "between nodes"}


def speed_figure(
    result: StudyResult, speeds: Mapping[str, Mapping[str, float]], style: Style
) -> Spec:
    """Gap against measured tokens/s, one panel a bandwidth, with the Pareto front."""
    panels = []
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
        panels.append(_Panel(key, style.dress(rows), x, sign=-1))
    return _figure(result, style, panels)


def _figure(result: StudyResult, style: Style, panels: Sequence[_Panel]) -> Spec:
    """The panels with their data, and one legend of arms and verdicts."""
    data: dict[str, Sequence[Row]] = {}
    for panel in panels:
        data |= _data(result, panel)
    drawn = [_draw(result, style, p, data, first=p is panels[0]) for p in panels]
    longest = max(len(row["look"]) for panel in panels for row in panel.rows)
    return finish(beside(drawn, 2), data, side=70, legend=max(110, 45 + 7 * longest))


def _gaps(result: StudyResult, panel: _Panel) -> GapAxis:
    assert result.margin is not None
    return GapAxis.around(result.margin, *ends(panel.rows))


def _data(result: StudyResult, panel: _Panel) -> dict[str, Sequence[Row]]:
    """With one seed the noise band and no front: gaps inside the noise have no order."""
    assert result.margin is not None
    key = panel.key
    best = [] if one_seed(result) else front_rows(result, panel.rows, key, panel.sign)
    noise = lone_bands(result).get(result.study.baseline)
    data: dict[str, Sequence[Row]] = {
        key: panel.rows,
        f"{key}_margin": margin_rows(result.margin),
    }
    data |= {f"{key}_noise": [{"low": -noise, "high": noise}]} if noise else {}
    return data | ({f"{key}_front": best} if best else {})


def _draw(
    result: StudyResult,
    style: Style,
    panel: _Panel,
    data: Mapping[str, Sequence[Row]],
    first: bool,
) -> Any:
    """One panel; the first has what a click in the legends of all picks."""
    key, gaps = panel.key, _gaps(result, panel)
    y: dict[str, Any] = {"scale": gaps.scale, "axis": gaps.axis(PANEL[1]), "title": GAP}
    layers = [
        *margin_layers("y", gaps, GAP, PANEL[1], f"{key}_margin"),
        *([_noise(f"{key}_noise", y)] if f"{key}_noise" in data else []),
        *([_front(f"{key}_front", panel, y)] if f"{key}_front" in data else []),
        *_points(panel, style, y, first),
    ]
    return alt.layer(*layers).properties(width=PANEL[0], height=PANEL[1])


def _noise(data: str, y: dict[str, Any]) -> alt.Chart:
    rect = chart(data, by_arm=False).mark_rect(**NOISE)
    return rect.encode(y=alt.Y("low:Q", **y), y2="high:Q")


def _front(data: str, panel: _Panel, y: dict[str, Any]) -> alt.Chart:
    step: Any = "step-after" if panel.sign > 0 else "step-before"
    line = chart(data, by_arm=False).mark_line(
        interpolate=step, color="#111827", strokeWidth=1.2, strokeDash=[5, 3], clip=True
    )
    return line.encode(x=panel.x, y=alt.Y("mean:Q", **y))


def _points(panel: _Panel, style: Style, y: dict[str, Any], first: bool) -> list[alt.Chart]:
    """Intervals and means."""
    picks = [legend_pick(field, f"pick_{field}") for field in ("verdict", "look")]
    color = style.color(panel.rows, POINTS)
    seen = alt.condition(reduce(and_, picks), alt.value(1), alt.value(0.1))
    base = chart(panel.key).encode(x=panel.x, color=color, opacity=seen)
    point = base.mark_point(size=80, filled=True, opacity=1).encode(
        y=alt.Y("mean:Q", **y),
        shape=style.shape(list({row["verdict"] for row in panel.rows})),
        tooltip=gap_tooltip(),
    )
    return [
        base.mark_rule(strokeWidth=1.5, clip=True).encode(y=alt.Y("low:Q", **y), y2="high:Q"),
        point.add_params(*picks) if first else point,
    ]
