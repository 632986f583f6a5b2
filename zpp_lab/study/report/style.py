"""How every figure looks: each arm's colour and dash, axes, legends, the filter.

An arm has one look everywhere, in a study's report and in its dashboard; the baseline is black.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from zpp_lab.config.study import CONTROLS, StudyConfig
from zpp_lab.study.judge import claims

LOOKS = 20  # arms with a look of their own; more could not be told apart
OTHERS = "other arms"
_SOLID = (1.0, 0.0)
# Beside the hue, for print in grey, for eyes that see two hues as one, and so that a line that
# covers an equal one lets it show through.
_DASHES = (_SOLID, (7.0, 3.0), (3.0, 2.0), (9.0, 3.0, 2.0, 3.0))
# First Paul Tol's "muted" scheme. Each of the others was chosen to be as far as can be, in OKLab,
# from those before it and from the greys, as most people see them and as red- and green-blind
# readers do; where these might take one for another, the dashes differ.
_HUES = (
    *("#332288", "#CC6677", "#117733", "#DDAA33", "#44AA99", "#882255", "#88CCEE"),
    *("#AA4499", "#999933", "#0B6EFF", "#7D98F5", "#6F3DE0", "#5AD87E", "#1F4217"),
    *("#596DB2", "#C21B0D", "#522545", "#D773D0", "#292FCB"),
)
# Controls are no candidates, so they stand back: the greys that colour-blind readers least take
# for a hue, with dashes that no hue has.
_GREYS = ("#646464", "#888888", "#404040")
_GREY_DASHES = ((14.0, 3.0), (2.0, 4.0))

_DIGIT, _AIR, _LINE = 6.3, 12.0, 15.0  # pixels of the axes' labels: a character, between two, a row
GREY = "#6b7280"
BAND = "#e5e7eb"
_RING = "M-1,0A1,1,0,1,1,1,0A1,1,0,1,1,-1,0ZM-.4,0A.4,.4,0,1,0,.4,0A.4,.4,0,1,0,-.4,0Z"
SHAPES = {
    "baseline": "square",
    claims.ON_PAR: "circle",
    claims.ON_PAR_MARKED: _RING,
    claims.BETTER: "triangle-down",
    claims.BELOW_OPEN: "triangle-left",
    claims.ABOVE_OPEN: "triangle-right",
    claims.WORSE: "triangle-up",
    claims.UNDECIDED: "diamond",
    "diverged": "cross",
    "failed": "cross",
    "no baseline": "cross",
    "not judged": "cross",
    "unfinished": "cross",
    "not run": "cross",
}
_GOOD, _BELOW, _OPEN, _BAD = "#0B6B4B", "#1B5CA8", "#8A6400", "#A8380A"
MEANING = dict.fromkeys(claims.INSIDE, _GOOD) | {
    **dict.fromkeys((claims.BETTER, claims.BELOW_OPEN), _BELOW),
    **dict.fromkeys((claims.UNDECIDED, claims.ABOVE_OPEN), _OPEN),
    **dict.fromkeys((claims.WORSE, "diverged", "failed"), _BAD),
}
_STROKE: dict[str, Any] = {  # 30 pixels, as a dash needs 17; a larger size would part the rows
    "symbolType": "M-3,0L3,0",
    "symbolSize": 100,
    "symbolStrokeWidth": 2,
    "symbolOpacity": 1,
    "symbolOffset": 10,
    "labelOffset": 19,
}
LINES = alt.Legend(labelLimit=300, **_STROKE)  # the legend of a figure of lines, and of points
POINTS = alt.Legend(labelLimit=300, symbolType="circle", symbolSize=70, symbolOpacity=1)
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "white",
    "padding": 8,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titlePadding": 9,  # wide labels, such as +0.048, are measured too narrow
        "titleFontWeight": "normal",
        "labelColor": "#374151",
        "titleColor": "#111827",
        "gridColor": "#eef0f3",
        "domainColor": "#9ca3af",
        "tickColor": "#9ca3af",
    },
    "legend": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"},
    "title": {
        "frame": "group",
        "fontSize": 13,
        "fontWeight": 600,
        "anchor": "start",
        "color": "#111827",
    },
    "header": {"labelFontSize": 11, "titleFontSize": 12, "labelFontWeight": 600},
}
_LOOK = "datum.look || datum.arm"  # most arms' look has their name, which need not be said twice
NOT_HIDDEN = "indexof(hidden, datum.arm) < 0"  # `hidden`: arms that the page's filter leaves out


@dataclass(frozen=True)
class Look:
    """A colour as #RRGGBB, and a dash as pixels drawn and left out by turns."""

    color: str
    dash: tuple[float, ...] = _SOLID


BASELINE = Look("#111111")
OTHER = Look("#B6BCC6")
HUES = tuple(Look(hue, _DASHES[i % len(_DASHES)]) for i, hue in enumerate(_HUES))
GREYS = tuple(Look(grey, _GREY_DASHES[i % len(_GREY_DASHES)]) for i, grey in enumerate(_GREYS))


def arm_looks(
    arms: Iterable[str],
    baseline: str,
    controls: Collection[str] = (),
    taken: Mapping[str, Look] | None = None,
) -> dict[str, Look]:
    """Return the looks of the baseline and of the next arms, LOOKS in all, in order.

    No two are alike. controls: arms in grey tones, as long as there are some. taken: looks that
    arms have already; the others get what these leave.
    """
    taken = dict(taken or {})
    greys, hues = ([one for one in some if one not in taken.values()] for some in (GREYS, HUES))
    looks = {baseline: BASELINE}
    for arm in [arm for arm in dict.fromkeys(arms) if arm != baseline][: LOOKS - 1]:
        left = greys if arm in controls and greys else hues
        looks[arm] = taken[arm] if arm in taken else left.pop(0)
    return looks


def study_looks(study: StudyConfig, chosen: Sequence[str] = ()) -> dict[str, Look]:
    """Return the looks of a study's arms; of those in `chosen`, where they are many."""
    controls = [arm.name for arm in study.arms if arm.role in CONTROLS]
    return arm_looks(chosen or [arm.name for arm in study.arms], study.baseline, controls)


class Style:
    """Colour, dash and shape of the arms of one study. Arms that are not told apart are grey."""

    def __init__(self, looks: Mapping[str, Look], baseline: str) -> None:
        self.baseline = baseline
        self.arms = list(looks)
        every = {**looks, OTHERS: OTHER}
        self.colors = {arm: look.color for arm, look in every.items()}
        self.dashes = {arm: list(look.dash) for arm, look in every.items()}

    def look(self, arm: str) -> str:
        return arm if arm in self.colors else OTHERS

    def dress(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the field `look`; the baseline's come last, on top."""
        order = {OTHERS: 0, self.baseline: 2}
        dressed = [{**row, "look": self.look(row["arm"])} for row in rows]
        return sorted(dressed, key=lambda row: order.get(row["look"], 1))

    def color(
        self, rows: Iterable[Mapping[str, Any]], legend: alt.Legend | None = LINES
    ) -> alt.Color:
        """Return colour by arm; the legend has those of the dressed `rows`."""
        shown = self.shown(rows)
        return alt.Color(
            "look:N",
            title="Arm",
            scale=alt.Scale(domain=shown, range=[self.colors[look] for look in shown]),
            legend=legend,
        )

    def dash(self, rows: Iterable[Mapping[str, Any]]) -> alt.StrokeDash:
        """Return the dash by arm, with the colour's title and legend, so that one shows both."""
        shown = self.shown(rows)
        dashes: list[Any] = [self.dashes[look] for look in shown]
        scale = alt.Scale(domain=shown, range=dashes)
        return alt.StrokeDash("look:N", title="Arm", scale=scale, legend=LINES)

    def shown(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return the looks of the dressed `rows`, in the legend's order."""
        looks = {row["look"] for row in rows}
        return [look for look in self.colors if look in looks]

    def verdict(self, verdicts: Sequence[str]) -> alt.Color:
        """Return colour by what an arm's verdict means; no legend, words stand next to it."""
        shown = [verdict for verdict in SHAPES if verdict in verdicts]
        colors = [MEANING.get(verdict, GREY) for verdict in shown]
        scale = alt.Scale(domain=shown, range=colors)
        return alt.Color("verdict:N", title="Verdict", scale=scale, legend=None)

    def shape(self, verdicts: Sequence[str], legend: bool = True) -> alt.Shape:
        shown = [verdict for verdict in SHAPES if verdict in verdicts]
        return alt.Shape(
            "verdict:N",
            title="Verdict",
            scale=alt.Scale(domain=shown, range=[SHAPES[v] for v in shown]),
            legend=alt.Legend() if legend else None,
        )


def chart(data: str, by_arm: bool = True) -> alt.Chart:
    """Return a chart on the rows called `data`; the page's filter hides arms."""
    made = alt.Chart(alt.NamedData(name=data))
    return made.transform_calculate(look=_LOOK).transform_filter(NOT_HIDDEN) if by_arm else made


def legend_pick(field: str = "look", name: str = "pick") -> alt.Parameter:
    """Return a click on an entry of the legend of `field` singles it out. For `add_params` of one
    mark that has this legend: a layer, or a mark without it, would leave the legend dead."""
    return alt.selection_point(name=name, fields=[field], bind="legend")


def quantities(fields: Mapping[str, tuple[str, str]]) -> list[alt.Tooltip]:
    """Return what a mark says when it is held: the title and the format of each numeric field."""
    return [alt.Tooltip(f"{k}:Q", title=title, format=form) for k, (title, form) in fields.items()]


def concat_panels(panels: Sequence[alt.LayerChart], columns: int, **more: Any) -> dict[str, Any]:
    """Return the panels in rows of `columns`, for `finish`. Altair's own concat copies them for
    seconds. Parameters go to the top, as there; panels' own need names of their own."""
    specs = [panel.to_dict(validate=False) for panel in panels]
    params = [param for one in specs for param in one.get("params", [])]
    hidden = ("$schema", "config", "params")
    bare = [{k: v for k, v in one.items() if k not in hidden} for one in specs]
    return {"$schema": alt.SCHEMA_URL, "concat": bare, "columns": columns, "params": params, **more}


def finish(
    made: Any, rows: Mapping[str, Sequence[Mapping[str, Any]]], side: int, legend: int = 0
) -> dict[str, Any]:
    """Return a whole figure with the common look, as a Vega-Lite specification.

    rows: the data of the names that the chart's marks use. They are added here, at the end,
    because Altair copies and checks all that it holds over and over. side, legend: pixels that
    axes take next to each panel, and the legend next to all; the page fits narrow screens by them.
    """
    spec = made if isinstance(made, dict) else made.to_dict(validate=False)
    hidden = {"name": "hidden", "value": []}
    return spec | {
        "config": _CONFIG,
        "params": [*spec.get("params", []), hidden],
        "usermeta": {"side": side, "legend": legend},
        "datasets": {name: [_short(row) for row in values] for name, values in rows.items()},
    }


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Five digits are more than a picture shows, and half the bytes; see also _LOOK."""
    chosen = {k: v for k, v in row.items() if k != "look" or v != row.get("arm")}
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in chosen.items()}


@dataclass(frozen=True)
class GapAxis:
    """A signed axis that is linear around 0 and logarithmic beyond the margin.

    It shows a gap of a tenth of the margin and a negative control a thousand times larger in
    one picture. All numbers in nats; low and high are the axis's ends.
    """

    margin: float
    low: float
    high: float

    @classmethod
    def around(cls, margin: float, low: float, high: float) -> GapAxis:
        """Return the axis for data from low to high; it reaches at least ±2 margins."""
        return cls(margin, min(low * 1.3, -2 * margin), max(high * 1.3, 2 * margin))

    @property
    def scale(self) -> alt.Scale:
        ends = [self.low, self.high]
        return alt.Scale(type="symlog", constant=self.margin / 2, domain=ends, nice=False)

    def axis(self, length: float, across: bool = False) -> alt.Axis:
        """Return the axis of a panel of so many pixels; `across`: its labels stand side by side."""
        label = f"abs(abs(datum.value) / {self.margin} - 1) < 1e-9 ? format(datum.value, '+.2~g') "
        label += ": datum.value == 0 ? '0' : format(datum.value, '+~g')"
        values = self.ticks(length, across)
        return alt.Axis(values=values, labelExpr=label, labelOverlap=False)

    def ticks(self, length: float, across: bool = False) -> list[float]:
        """Return 0, the ends of the margin, then 1 and 3 of each decade, where labels fit."""
        beyond = [d for c in (1, 3) for k in range(-9, 6) if (d := c * 10.0**k) > self.margin]
        chosen: list[float] = []
        for mark in (0.0, *(sign * d for d in (self.margin, *beyond) for sign in (1, -1))):
            free = all(self._fit(mark, other, length, across) for other in chosen)
            if free and self.low <= mark <= self.high:
                chosen.append(mark)
        return sorted(chosen)

    def _fit(self, one: float, other: float, length: float, across: bool) -> bool:
        """Whether both labels can be read."""
        widths = [_DIGIT * len(f"{value:+.2g}") for value in (one, other)]
        wanted = sum(widths) / 2 + _AIR if across else _LINE
        return abs(self.place(one) - self.place(other)) * length >= wanted

    def place(self, value: float) -> float:
        """Return where a value lies on the axis, from 0 to 1."""
        low, high = self._log(self.low), self._log(self.high)
        return (self._log(value) - low) / (high - low)

    def _log(self, value: float) -> float:
        return math.copysign(math.log1p(abs(value) / (self.margin / 2)), value)
