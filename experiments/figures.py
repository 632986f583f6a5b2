"""Draws PAGE/figure.svg for the pages below from their own tables: python experiments/figures.py

Each row of a page's first table is a line of the figure, each column that is named here a point on
it with its interval; the numbers stand beside the points. So a figure shows what its table says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from zpp_lab.files import write_atomic

HERE = Path(__file__).parent
# Of series; each with its colour where the screen is dark.
COLORS = {"#2563eb": "#3b7aff", "#ea580c": "#b74000", "#6b7280": "#7c8391"}
MINUS = str.maketrans("−", "-", ",")


@dataclass(frozen=True)
class Plot:
    """columns: header → its name in the figure. labels: headers whose cells name a row; scale: of
    Vega-Lite. distance: whether signs do not matter. margin: shaded around 0, with ticks
    at powers of ten. step: pixels of a point, where a row has several."""

    title: str
    columns: dict[str, str]
    labels: tuple[str, ...] = ()
    scale: str = "linear"
    distance: bool = False
    margin: float = 0.0
    step: int = 20


PLOTS = {
    "activations": Plot(
        "Held-out loss above the uncompressed twin, nats a token",
        {"gap, 13.8M": "13.8M parameters", "gap, 133M": "133M parameters"},
        scale="symlog",
        margin=0.0048,
        step=13,
    ),
    "baseline": Plot(
        "Seconds a step of 16,384 tokens, plain ZeRO-3 on four H200s",
        {"1.3B, s a step": "1.3B", "13B, s a step": "13B"},
    ),
    "beyond": Plot("Share of compute alone", {"of compute alone": "share"}),
    "collectives": Plot(
        "Milliseconds for 640 MiB of bf16, four H200s on NVLink",
        {"gather": "gather", "reduction": "reduction", "floor": "floor"},
    ),
    "edges": Plot(
        "Largest gap of the training loss to zero3, nats a token",
        {"largest gap of the training loss": "largest gap"},
    ),
    "plan": Plot("Peak of tensors, GiB a GPU", {"planned": "planned", "measured": "measured"}),
    "qexport": Plot(
        "Held-out loss above unquantized ZeRO-3, nats a byte",
        {
            "trained with it − ZeRO-3": "trained with the codec",
            "rounded afterwards − ZeRO-3": "rounded afterwards",
        },
        scale="symlog",
    ),
    "quiet": Plot(
        "Distance that another order of sums makes, nats a token",
        {"gap": "held-out distance"},
        labels=("split run of", "seed"),
        scale="log",
        distance=True,
    ),
    "virtual": Plot("Seconds a step of 262,144 tokens, one H200", {"seconds a step": "seconds"}),
}


def table(page: Path) -> list[dict[str, str]]:
    """The rows of a page's first table, by the header's cells."""
    lines = re.search(r"(?:^\|.*\n)+", page.read_text(), re.M)
    assert lines is not None, f"{page} has no table"
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|\n").split("|")]
        for line in lines[0].strip().splitlines()
    ]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def points(name: str) -> list[dict[str, Any]]:
    """What the figure of page `name` shows, a point each: row, series, text, value, low, high."""
    plot, found = PLOTS[name], []
    for row in table(HERE / name / "README.md"):
        label = ", seed ".join(row[head] for head in plot.labels or list(row)[:1])
        for column, series in plot.columns.items():
            numbers = re.findall(r"[+-]?\d+(?:\.\d+)?", row[column].translate(MINUS))
            if not numbers:
                continue
            value, half = float(numbers[0]), float(numbers[1]) if "±" in row[column] else 0.0
            value = abs(value) if plot.distance else value
            ends = {"low": value - half, "high": value + half}
            found.append(
                {"row": label, "series": series, "text": row[column], "value": value} | ends
            )
    return found


def chart(name: str) -> alt.LayerChart:
    plot, rows = PLOTS[name], points(name)
    series = list(plot.columns.values())
    scale = (
        alt.Scale(type=plot.scale)
        if plot.scale != "symlog"
        else alt.Scale(type="symlog", constant=0.01, nice=not plot.margin)
    )
    axis = alt.Axis(values=[0, 0.01, 0.1, 1], format="~g") if plot.margin else alt.Undefined
    x = alt.X("value:Q", title=None, scale=scale, axis=axis)
    y = alt.Y(
        "row:N",
        title=None,
        sort=list(dict.fromkeys(row["row"] for row in rows)),
        axis=alt.Axis(labelLimit=320, grid=False),
    )
    offset = alt.YOffset("series:N", sort=series)
    color = alt.Color(
        "series:N",
        title=None,
        sort=series,
        scale=alt.Scale(domain=series, range=list(COLORS)[: len(series)]),
        legend=alt.Legend(orient="top", labelFontSize=13) if len(series) > 1 else None,
    )
    every = alt.Chart(alt.Data(values=rows)).encode(y=y, yOffset=offset, color=color)
    layers = [
        every.mark_rule(strokeWidth=2).encode(
            x=alt.X("low:Q", title=None, scale=scale), x2="high:Q"
        ),
        every.mark_point(size=70, filled=True, opacity=1).encode(x=x),
        every.mark_text(align="left", dx=9, fontSize=12).encode(
            x=alt.X("high:Q", title=None, scale=scale), text="text:N"
        ),
    ]
    if plot.margin:
        ends = alt.Data(values=[{"low": -plot.margin, "high": plot.margin}])
        x = alt.X("low:Q", title=None, scale=scale, axis=axis)
        shade = alt.Chart(ends).mark_rect(color=list(COLORS)[2], opacity=0.15)
        layers.insert(0, shade.encode(x=x, x2="high:Q"))
    height = alt.Step(plot.step if len(series) > 1 else 26)
    room = {"left": 20, "top": 5, "right": 30, "bottom": 5}  # fonts of browsers may be wider
    return alt.layer(*layers).properties(width=430, height=height, title=plot.title, padding=room)


def main(names: Sequence[str] = tuple(PLOTS)) -> int:
    sys.path.insert(0, str(HERE / "reference"))
    from law import figure

    for name in names:
        svg = figure(chart(name), COLORS)
        write_atomic(HERE / name / "figure.svg", svg)
        print(HERE / name / "figure.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or tuple(PLOTS)))
