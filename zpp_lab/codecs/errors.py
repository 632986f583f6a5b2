"""Error telemetry: what a codec did to the values of a wire, by parameter class.

`error_sums` is the definition that the kernel of cuda/codec/errors.cu equals bit for bit, so the
order of its fp64 sums is fixed: tiles of 8192 neighbouring elements, each cut as one thread block
holds it, 8 warps of 4 chunks of 32 lanes of 8 elements. A lane adds its chunks' elements one by one
onto 0, neighbouring lanes are added in pairs, then the warps in order, then the tiles as
`numerics.fold_sum` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zpp_lab.codecs.base import Codec
from zpp_lab.codecs.numerics import fold_sum
from zpp_lab.config.wires import Wire

Telemetry = dict[Wire, dict[str, dict[str, float]]]
SUMS = ("error2", "x2", "y2", "xy", "error", "abs_x", "zeroed", "saturated", "count")
TILE = 8192
AT_ONCE = 2**22  # elements whose terms are held at a time
_SHAPE = (8, 4, 32, 8)  # warps, chunks, lanes, neighbours


def error_sums(codec: Codec, x: Tensor, payload: Tensor) -> Tensor:
    """Sum a codec's errors over each row: x float [R, n] and its payload uint8 [R, codec.nbytes(n)]
    → fp64 [R, 9], in the order of SUMS. y is what the payload decodes to, in fp32. `saturated`
    counts codes at either end of the code's range, as their share times n, and `zeroed` values
    other than 0 that decode to 0."""
    each = max(1, AT_ONCE // max(1, x.shape[1]))
    parts = zip(x.split(each), payload.split(each), strict=True)
    return torch.cat([_error_sums(codec, rows, slots) for rows, slots in parts])


def _error_sums(codec: Codec, x: Tensor, payload: Tensor) -> Tensor:
    rows, numel = x.shape
    out = torch.zeros(rows, len(SUMS), dtype=torch.float64, device=x.device)
    if not numel:
        return out
    shape = _SHAPE if numel > TILE else _part(numel)
    wide = max(1, AT_ONCE // (rows * TILE)) * TILE  # whole tiles: their sums stay what they are
    parts = zip(x.split(wide, 1), codec.decode(payload, numel).split(wide, 1), strict=True)
    tiles = torch.cat([_tiles(_terms(a, b), shape) for a, b in parts], dim=-1)
    out[:, : len(tiles)] = fold_sum(tiles).t()
    out[:, -2] = codec.saturated(payload, numel).double() * numel
    out[:, -1] = numel
    return out


def _terms(x: Tensor, y: Tensor) -> Tensor:
    """Return the terms of the first seven SUMS, fp64 [7, R, n], 56 bytes an element."""
    terms = torch.empty(7, *x.shape, dtype=torch.float64, device=x.device)
    a, b = x.double(), y.double()
    error = torch.sub(b, a, out=terms[4])
    torch.square(error, out=terms[0])
    torch.square(a, out=terms[1])
    torch.square(b, out=terms[2])
    torch.mul(a, b, out=terms[3])
    torch.abs(a, out=terms[5])
    terms[6] = (b == 0) & (a != 0)
    return terms


def _tiles(terms: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Sum each tile of fp64 [..., n] → [..., tiles], in the order that the module describes."""
    fill = -terms.shape[-1] % math.prod(shape)
    if fill:
        terms = torch.nn.functional.pad(terms, (0, fill))
    terms = terms.view(*terms.shape[:-1], -1, *shape)
    lanes = torch.zeros_like(terms[..., 0, :, 0])
    for chunk in terms.unbind(-3):
        for element in chunk.unbind(-1):
            lanes = lanes + element
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    total, *others = lanes[..., 0].unbind(-1)
    for warp in others:
        total = total + warp
    return total


def _part(numel: int) -> tuple[int, int, int, int]:
    """Return the part of a tile that 1 ≤ n ≤ TILE elements reach; the rest adds zeros only."""
    _, chunks, lanes, neighbours = _SHAPE
    chunk = lanes * neighbours
    if numel > chunk * chunks:
        return -(-numel // (chunk * chunks)), chunks, lanes, neighbours
    if numel > chunk:
        return 1, -(-numel // chunk), lanes, neighbours
    return 1, 1, 1 << (-(-numel // neighbours) - 1).bit_length(), neighbours


@dataclass(frozen=True, order=True)
class Column:
    """What a sum is of: one parameter in one micro-step's transfer on a wire."""

    wire: Wire
    kind: str  # the parameter's class
    name: str
    micro: int


@dataclass
class ErrorSums:
    """fp64 sums over (x, decoded y) pairs of a step, by parameter and by the rank that encoded.
    They are added only at the step's end: engines meet parameters and ranks in different orders,
    and the figures must not depend on the engine."""

    sums: dict[Column, dict[int, Tensor]] = field(default_factory=dict)

    def add(self, column: Column, rank: int, sums: Tensor) -> None:
        """Add fp64 [9] over all rows of `rank`. A repeated identical transfer counts once."""
        self.sums.setdefault(column, {}).setdefault(rank, sums)

    def drop(self, unused: Set[tuple[Wire, str]]) -> None:
        """Forget parameters on wires that brought them without use."""
        self.sums = {c: of for c, of in self.sums.items() if (c.wire, c.name) not in unused}

    def by_rank(self) -> tuple[list[Column], Tensor | None]:
        """Return the columns in order and their sums, fp64 [ranks, columns, 9], or None."""
        columns = sorted(self.sums)
        if not columns:
            return [], None
        rows = [torch.stack([of for _, of in sorted(self.sums[c].items())]) for c in columns]
        return columns, torch.stack(rows, dim=1)


def telemetry(columns: Sequence[Column], sums: Tensor | None) -> Telemetry:
    """Turn `ErrorSums.by_rank` of all ranks into {wire: {class: figures}}, see `figures`. The names
    of parameters and the ranks fix the order in which a class's sums are added."""
    out: Telemetry = {}
    if sums is None:
        return out
    places: dict[tuple[Wire, str], list[int]] = {}
    for i, column in enumerate(columns):
        places.setdefault((column.wire, column.kind), []).append(i)
    totals = [fold_sum(sums[:, place].flatten(0, 1).t()) for place in places.values()]
    for (wire, kind), values in zip(places, torch.stack(totals).tolist(), strict=True):
        out.setdefault(wire, {})[kind] = figures(dict(zip(SUMS, values, strict=True)))
    return out


def figures(s: dict[str, float]) -> dict[str, float]:
    """Compute nmse = Σ(y-x)² / Σx²; bias = Σ(y-x) / Σ|x|; the cosine of x and y; shares of codes at
    the range's ends (saturated) and of non-zero values that became 0 (zeroed)."""
    return {
        "nmse": _ratio(s["error2"], s["x2"]),
        "bias": _ratio(s["error"], s["abs_x"]),
        "cosine": _ratio(s["xy"], math.sqrt(s["x2"] * s["y2"])),
        "saturated": s["saturated"] / s["count"],
        "zeroed": s["zeroed"] / s["count"],
    }


def _ratio(a: float, b: float) -> float:
    """Return a / b, 0 where both are 0 (all-zero tensors carry no error)."""
    return a / b if b else (0.0 if a == 0 else math.inf)
