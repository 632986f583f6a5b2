"""The figures of the final gaps against what an arm costs, bytes sent or measured speed, and of the
main effects and interactions of the swept factors, as small panels on one gap axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import altair as alt

from zpp_lab.study.judge.effects import Estimate, Interaction, MainEffect, level_order, level_text
from zpp_lab.study.judge.noise import one_seed
from zpp_lab.study.judge.verdict import StudyResult
from zpp_lab.study.report.figures.curves import Row
from zpp_lab.study.report.figures.gap import (
    ESTIMATE,
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
from zpp_lab.study.report.style import (
    POINTS,
    GapAxis,
    Style,
    chart,
    concat_panels,
    finish,
    legend_pick,
    quantities,
)


@dataclass(frozen=True)
class _Panel:
    """A panel: the cost's field in its rows, and its axis. sign: −1 where more is better."""

    key: str
    rows: Sequence[Row]
    x: alt.X
    sign: int = 1


def bytes_figure(result: StudyResult, style: Style) -> Spec:
    """Plot gap against bytes a step, over all links and between nodes, with fronts."""
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
    """Return gap against measured tokens/s, one panel a bandwidth, with the Pareto front."""
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
    return finish(concat_panels(drawn, 2), data, side=70, legend=max(110, 45 + 7 * longest))


def _gaps(result: StudyResult, panel: _Panel) -> GapAxis:
    assert result.margin is not None
    return GapAxis.around(result.margin, *ends(panel.rows))


def _data(result: StudyResult, panel: _Panel) -> dict[str, Sequence[Row]]:
    """With one seed the noise band and no front: gaps inside the noise have no order."""
    assert result.margin is not None
    key = panel.key
    best = [] if one_seed(result) else front_rows(result, panel.rows, key, panel.sign)
    noise = lone_bands(result).get(result.study.baseline)
    data: dict[str, Sequence[Row]] = {key: panel.rows, f"{key}_margin": margin_rows(result.margin)}
    data |= {f"{key}_noise": [{"low": -noise, "high": noise}]} if noise else {}
    return data | ({f"{key}_front": best} if best else {})


def _draw(
    result: StudyResult, style: Style, panel: _Panel, data: Mapping[str, Sequence[Row]], first: bool
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


MOST_PAIRS = 6
_SIZE = {"width": 225, "height": 220}
_INK = "#332288"
_STEPS = (  # of the scheme viridis
    *("#440154", "#482878", "#3E4A89", "#31688E", "#26828E", "#1F9E89"),
    *("#35B779", "#6DCD59", "#B4DE2C", "#FDE725"),
)


def main_effects_figure(
    effects: Sequence[MainEffect], margin: float, short: Mapping[str, str]
) -> Spec:
    """Plot main effects. Thick: means over matched groups, with intervals. Thin: single arms."""
    rows = [_main_rows(effect) for effect in effects]
    arms = [_arm_rows(effect) for effect in effects]
    every = [row for group in (*rows, *arms) for row in group]
    gaps = GapAxis.around(margin, *ends(every))
    panels, data = [], {"margin": margin_rows(margin)}
    for i, effect in enumerate(effects):
        every = level_order({*effect.levels, *effect.left_out})
        order = [level_text(level, effect.factor) for level in every]
        panels.append(_main_panel(i, short[effect.factor], order, gaps))
        data |= {f"means{i}": rows[i], f"arms{i}": arms[i]}
    return finish(concat_panels(panels, 3), data, side=70)


def interactions_figure(
    found: Sequence[Interaction], margin: float, short: Mapping[str, str]
) -> Spec:
    """Return mean gaps over the grid of two factors; lines that are not parallel interact."""
    shown = found[:MOST_PAIRS]
    rows = [_grid_rows(i, one) for i, one in enumerate(shown)]
    gaps = GapAxis.around(margin, *ends([row for group in rows for row in group]))
    panels, data = [], {"margin": margin_rows(margin)}
    for i, one in enumerate(shown):
        panels.append(_grid_panel(i, one, gaps, short))
        data |= {f"grid{i}": rows[i]}
    apart = {"scale": {"color": "independent", "shape": "independent"}}
    return finish(concat_panels(panels, 3, resolve=apart), data, side=70)


def _main_panel(number: int, factor: str, order: Sequence[str], gaps: GapAxis) -> Any:
    x, y = _axes(factor, order, gaps)
    tooltip: list[Any] = ["arm:N", "level:N", alt.Tooltip("mean:Q", title="gap", format="+.5f")]
    arms = chart(f"arms{number}").encode(x=x, y=y("mean:Q"), tooltip=tooltip)
    thin = arms.mark_line(color="#9ca3af", strokeWidth=0.8, opacity=0.7)
    dots = arms.mark_point(color="#6b7280", size=14, filled=True, opacity=0.7)
    means = chart(f"means{number}", by_arm=False)
    line = means.mark_line(color=_INK, strokeWidth=2.4).encode(x=x, y=y("mean:Q"))
    rule = means.mark_rule(color=_INK, strokeWidth=2, clip=True)
    point = means.mark_point(color=_INK, size=60, filled=True, opacity=1)
    layers = [
        *margin_layers("y", gaps, GAP, _SIZE["height"]),
        thin.encode(detail="group:N"),
        dots,
        line,
        rule.encode(x=x, y=y("low:Q"), y2="high:Q"),
        point.encode(x=x, y=y("mean:Q"), tooltip=_tooltip("level:N")),
    ]
    return alt.layer(*layers).properties(**_SIZE)


def _grid_panel(number: int, one: Interaction, gaps: GapAxis, short: Mapping[str, str]) -> Any:
    first, second = (short[name] for name in one.factors)
    order, lines = (
        [level_text(v, one.factors[i]) for v in level_order({key[i] for key in one.cells})]
        for i in (0, 1)
    )
    x, y = _axes(first, order, gaps)
    legend = alt.Legend(orient="bottom", columns=4, symbolType="stroke", symbolStrokeWidth=3)
    picked = [_STEPS[i * (len(_STEPS) - 1) // max(1, len(lines) - 1)] for i in range(len(lines))]
    scale = alt.Scale(domain=lines, range=picked)
    line = f"line{number}"  # legends of one field would all hear a click on one of them
    color = alt.Color(f"{line}:O", title=second, sort=lines, scale=scale, legend=legend)
    shape = alt.Shape(f"{line}:N", sort=lines, legend=None)
    pick = legend_pick(line, f"pick{number}")
    seen = alt.condition(pick, alt.value(1), alt.value(0.1))
    base = chart(f"grid{number}", by_arm=False).encode(x=x, color=color, opacity=seen)
    tooltip = _tooltip("level:N", alt.Tooltip(f"{line}:N", title=second))
    layers = [
        *margin_layers("y", gaps, GAP, _SIZE["height"]),
        base.mark_line(strokeWidth=2).encode(y=y("mean:Q")).add_params(pick),
        base.mark_rule(strokeWidth=1.5, clip=True).encode(y=y("low:Q"), y2="high:Q"),
        base.mark_point(size=55, filled=True, opacity=1).encode(
            y=y("mean:Q"), shape=shape, tooltip=tooltip
        ),
    ]
    return alt.layer(*layers).properties(**_SIZE)


def _axes(factor: str, order: Sequence[str], gaps: GapAxis) -> tuple[alt.X, Any]:
    axis = alt.Axis(labelAngle=0 if max(map(len, order)) < 8 else -35, grid=False, labelLimit=90)
    x = alt.X("level:N", sort=list(order), title=factor, axis=axis, scale=alt.Scale(domain=order))

    def y(field: str) -> alt.Y:
        return alt.Y(field, scale=gaps.scale, axis=gaps.axis(_SIZE["height"]), title=GAP)

    return x, y


def _main_rows(effect: MainEffect) -> list[Row]:
    return [
        {"level": level_text(level, effect.factor), **_numbers(e)}
        for level, e in effect.levels.items()
    ]


def _arm_rows(effect: MainEffect) -> list[Row]:
    return [
        {"group": group, "level": level_text(level, effect.factor), "arm": arm}
        | dict.fromkeys(("mean", "low", "high"), gap)
        for group, level, arm, gap in effect.arms
    ]


def _grid_rows(number: int, one: Interaction) -> list[Row]:
    first, second = one.factors
    return [
        {"level": level_text(a, first), f"line{number}": level_text(b, second), **_numbers(e)}
        for (a, b), e in one.cells.items()
    ]


def _numbers(e: Estimate) -> Row:
    return {"mean": e.mean, "low": e.low, "high": e.high, "seeds": e.seeds}


def _tooltip(*names: Any) -> list[Any]:
    return [*names, *quantities(ESTIMATE), "seeds:Q"]
