"""Error telemetry: what a codec did to the values of a wire, by parameter class."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zpp_lab.codecs.base import Codec
from zpp_lab.config import Wire

Telemetry = dict[Wire, dict[str, dict[str, float]]]
_SUMS = ("error2", "x2", "y2", "xy", "error", "abs_x", "zeroed", "saturated", "count")


@dataclass
class ErrorSums:
    """fp64 sums over (x, decoded y) pairs, kept by wire and parameter class."""

    sums: dict[tuple[Wire, str], Tensor] = field(default_factory=dict)

    def add(
        self, wire: Wire, kind: str, x: Tensor, y: Tensor, codec: Codec, payload: Tensor
    ) -> None:
        """x, y [R, n] before and after; payload uint8 [R, codec.nbytes(n)]."""
        if not x.numel():
            return
        a, b = x.double(), y.double()
        terms = [
            (b - a).square().sum(),
            a.square().sum(),
            b.square().sum(),
            (a * b).sum(),
            (b - a).sum(),
            a.abs().sum(),
            ((b == 0) & (a != 0)).sum().double(),
            codec.saturated(payload, x.shape[-1]).double() * x.numel(),
            torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device),
        ]
        now = torch.stack(terms)
        key = (wire, kind)
        self.sums[key] = self.sums[key] + now if key in self.sums else now

    def telemetry(self) -> Telemetry:
        """{wire: {class: figures}}; see `figures`."""
        out: Telemetry = {}
        for (wire, kind), values in sorted(self.sums.items()):
            out.setdefault(wire, {})[kind] = figures(dict(zip(_SUMS, values.tolist(), strict=True)))
        return out


def figures(s: dict[str, float]) -> dict[str, float]:
    """nmse = Σ(y-x)² / Σx²; bias = Σ(y-x) / Σ|x|; cosine of x and y; shares of codes at the
    range's ends (saturated) and of non-zero values that became 0 (zeroed)."""
    return {
        "nmse": _ratio(s["error2"], s["x2"]),
        "bias": _ratio(s["error"], s["abs_x"]),
        "cosine": _ratio(s["xy"], math.sqrt(s["x2"] * s["y2"])),
        "saturated": s["saturated"] / s["count"],
        "zeroed": s["zeroed"] / s["count"],
    }


def _ratio(a: float, b: float) -> float:
    """a / b, 0 where both are 0 (all-zero tensors carry no error)."""
    return a / b if b else (0.0 if a == 0 else math.inf)
