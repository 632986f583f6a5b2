"""Main effects and interactions of the swept factors, as small panels on one gap axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from zpp_lab.study.judge.effects import Estimate, Interaction, MainEffect, level_order, level_text
from zpp_lab.study.report.figures.curves import Row
from zpp_lab.study.report.figures.gap import ESTIMATE, GAP, Spec, ends, margin_layers, margin_rows
from zpp_lab.study.report.style import GapAxis, beside, chart, finish, legend_pick, quantities

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
    """Thick: the mean over matched groups with its interval. Thin: arms alike in all else."""
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
    return finish(beside(panels, 3), data, side=70)


def interactions_figure(
    found: Sequence[Interaction], margin: float, short: Mapping[str, str]
) -> Spec:
    """Mean gaps over the grid of two factors; lines that are not parallel interact."""
    shown = found[:MOST_PAIRS]
    rows = [_grid_rows(i, one) for i, one in enumerate(shown)]
    gaps = GapAxis.around(margin, *ends([row for group in rows for row in group]))
    panels, data = [], {"margin": margin_rows(margin)}
    for i, one in enumerate(shown):
        panels.append(_grid_panel(i, one, gaps, short))
        data |= {f"grid{i}": rows[i]}
    apart = {"scale": {"color": "independent", "shape": "independent"}}
    return finish(beside(panels, 3, resolve=apart), data, side=70)


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
