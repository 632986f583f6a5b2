"""The rows behind the figures of speed: one a measurement, in the settings that have a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zpp_lab.study.speed_results import BASE, Measured, Setting, labels
from zpp_lab.study.speedup import BreakEven, SpeedUp, break_evens, speed_ups, without_base

Row = dict[str, Any]


@dataclass(frozen=True)
class Predicted:
    """What the cost model says of an arm; gbps: None where all GPUs are of one host."""

    setting: Setting
    arm: str
    gbps: float | None
    tokens_per_s: float


# Predictions for what was measured, and why others have none: `zpp_lab.predicted.predictions` of a
# machine. It is handed in, as a prediction needs torch and a report does not.
Predict = Callable[[Sequence[Measured]], tuple[list[Predicted], list[str]]]


@dataclass(frozen=True)
class SpeedFindings:
    """All that a page on speed shows, worked out once."""

    measured: Sequence[Measured]
    ups: Sequence[SpeedUp]
    breaks: Sequence[BreakEven]
    names: dict[Setting, str]
    alone: Sequence[Setting]  # without plain FSDP2
    predicted: Sequence[Predicted] = ()
    faults: Sequence[str] = ()  # why an arm has no prediction

    @property
    def arms(self) -> list[str]:
        """The base first, then in the table's order."""
        names = dict.fromkeys(m.arm for m in self.measured)
        return sorted(names, key=lambda arm: arm != BASE)


def find_speeds(measured: Sequence[Measured], predict: Predict | None = None) -> SpeedFindings:
    """Speed-ups, break-even bandwidths and names of settings of what was measured."""
    ups, names = speed_ups(measured), labels(measured)
    predicted, faults = predict(measured) if predict else ([], [])
    alone = without_base(measured)
    return SpeedFindings(measured, ups, break_evens(ups), names, alone, predicted, faults)


def link_rows(found: SpeedFindings) -> dict[Setting, list[Row]]:
    """Measurements with a bandwidth, by setting; `value` (low, high) is the speed-up, None where
    there is no base; `share` is that of the floor."""
    ups = {id(one.at): one for one in found.ups}
    rows: dict[Setting, list[Row]] = {}
    for m in found.measured:
        if m.gbps is not None:
            rows.setdefault(m.setting, []).append(_row(m, ups.get(id(m))))
    return {setting: sorted(group, key=lambda r: r["gbps"]) for setting, group in rows.items()}


def inside_rows(found: SpeedFindings) -> dict[Setting, list[Row]]:
    """Speed-ups where no bandwidth is known: inside a host, or on a link that nobody measured."""
    rows: dict[Setting, list[Row]] = {}
    for one in found.ups:
        if one.at.gbps is None:
            row = _row(one.at, one) | {"label": f"{one.value:.2f}×"}
            rows.setdefault(one.at.setting, []).append(row)
    return rows


def predicted_rows(found: SpeedFindings) -> dict[Setting, list[Row]]:
    """Predicted speed-ups over the predicted base, by setting."""
    bases = {(p.setting, p.gbps): p.tokens_per_s for p in found.predicted if p.arm == BASE}
    rows: dict[Setting, list[Row]] = {}
    for p in sorted(found.predicted, key=lambda p: p.gbps or 0.0):
        base = bases.get((p.setting, p.gbps))
        if base is not None and p.gbps is not None:
            row = {"arm": p.arm, "gbps": p.gbps, "value": p.tokens_per_s / base}
            rows.setdefault(p.setting, []).append(row | {"rate": p.tokens_per_s})
    return rows


def _row(m: Measured, up: SpeedUp | None) -> Row:
    return {
        "arm": m.arm,
        "link": m.place,
        "gbps": m.gbps,
        "rate": m.tokens_per_s,
        "value": up and up.value,
        "low": up and up.low,
        "high": up and up.high,
        "share": m.share_of_floor,
    }
