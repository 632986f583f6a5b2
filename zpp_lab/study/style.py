"""One look for all figures: an arm has one colour and dash everywhere, the baseline is black."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

# Paul Tol's "muted" scheme: nine hues that colour-blind readers can tell apart.
_HUES = (
    "#332288",
    "#CC6677",
    "#117733",
    "#DDAA33",
    "#44AA99",
    "#882255",
    "#88CCEE",
    "#AA4499",
    "#999933",
)
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_BASELINE = "#111111"
GREY = "#6b7280"
BAND = "#e5e7eb"
SHAPES = {
    "baseline": "square",
    "on par": "circle",
    "better": "triangle-down",
    "worse": "triangle-up",
    "undecided": "diamond",
    "diverged": "cross",
    "failed": "cross",
    "not run": "cross",
}
_LEGEND = alt.Legend(symbolType="stroke", symbolStrokeWidth=3, symbolOpacity=1)
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


class Style:
    """Colour, dash and shape encodings for the arms of one study."""

    def __init__(self, arms: Sequence[str], baseline: str) -> None:
        others = [arm for arm in arms if arm != baseline]
        self.arms = list(arms)
        self.baseline = baseline
        self.colors = {baseline: _BASELINE}
        self.dashes = {baseline: _DASHES[0]}
        for i, arm in enumerate(others):
            self.colors[arm] = _HUES[i % len(_HUES)]
            self.dashes[arm] = _DASHES[i // len(_HUES) % len(_DASHES)]

    def color(self, arms: Sequence[str] | None = None, legend: bool = True) -> alt.Color:
        """Colour by arm; `arms` limits the legend to those that the figure shows."""
        shown = self._shown(arms)
        return alt.Color(
            "arm:N",
            title="Arm",
            scale=alt.Scale(domain=shown, range=[self.colors[arm] for arm in shown]),
            legend=_LEGEND if legend else None,
        )

    def dash(self, arms: Sequence[str] | None = None) -> alt.StrokeDash:
        """Dash by arm; title and legend as the colour's, so that one legend shows both."""
        shown = self._shown(arms)
        dashes: list[Any] = [self.dashes[arm] for arm in shown]
        scale = alt.Scale(domain=shown, range=dashes)
        return alt.StrokeDash("arm:N", title="Arm", scale=scale, legend=_LEGEND)

    def _shown(self, arms: Sequence[str] | None) -> list[str]:
        return [arm for arm in self.arms if arms is None or arm in arms]

    def shape(self, verdicts: Sequence[str], legend: bool = True) -> alt.Shape:
        shown = [verdict for verdict in SHAPES if verdict in verdicts]
        return alt.Shape(
            "verdict:N",
            title="Verdict",
            scale=alt.Scale(domain=shown, range=[SHAPES[v] for v in shown]),
            legend=alt.Legend() if legend else None,
        )


def finish(chart: Any, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A whole figure with the common look, as a Vega-Lite specification.

    rows: the data of the names that the chart's marks use. They are added here, at the end,
    because Altair copies and checks all that it holds over and over.
    """
    styled = (
        chart.configure(font=FONT, background="white", padding=8)
        .configure_view(stroke=None)
        .configure_axis(
            labelFontSize=11,
            titleFontSize=12,
            titleFontWeight="normal",
            labelColor="#374151",
            titleColor="#111827",
            gridColor="#eef0f3",
            domainColor="#9ca3af",
            tickColor="#9ca3af",
        )
        .configure_legend(labelFontSize=11, titleFontSize=11, titleFontWeight="normal")
        .configure_title(fontSize=13, fontWeight=600, anchor="start", color="#111827")
        .configure_header(labelFontSize=11, titleFontSize=12, labelFontWeight=600)
    )
    return styled.to_dict() | {"datasets": {name: list(values) for name, values in rows.items()}}


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
        """The axis for data from low to high; it reaches at least ±2 margins."""
        return cls(margin, min(low * 1.3, -2 * margin), max(high * 1.3, 2 * margin))

    @property
    def scale(self) -> alt.Scale:
        ends = [self.low, self.high]
        return alt.Scale(type="symlog", constant=self.margin / 2, domain=ends, nice=False)

    @property
    def axis(self) -> alt.Axis:
        margin = self.margin
        decades = [d for k in range(-9, 6) for d in (10.0**k, 3 * 10.0**k) if d > 2.2 * margin]
        marks = [-margin, 0, margin, *decades, *(-d for d in decades)]
        inside = sorted(mark for mark in marks if self.low <= mark <= self.high)
        label = f"abs(abs(datum.value) / {margin} - 1) < 1e-9 ? format(datum.value, '+.2~g') : "
        label += "datum.value == 0 ? '0' : format(datum.value, '+~g')"
        return alt.Axis(values=inside, labelExpr=label, labelOverlap=False)

    def place(self, value: float) -> float:
        """Where a value lies on the axis, from 0 to 1."""
        low, high = self._log(self.low), self._log(self.high)
        return (self._log(value) - low) / (high - low)

    def value(self, place: float) -> float:
        """The inverse of `place`."""
        low, high = self._log(self.low), self._log(self.high)
        power = low + place * (high - low)
        return math.copysign(math.expm1(abs(power)) * self.margin / 2, power)

    def _log(self, value: float) -> float:
        return math.copysign(math.log1p(abs(value) / (self.margin / 2)), value)
