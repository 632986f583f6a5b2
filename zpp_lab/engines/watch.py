"""Looks at values on the wires when asked: error telemetry, or the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs import RawCodec
from zpp_lab.codecs.errors import SUMS, Column, ErrorSums, error_sums
from zpp_lab.codecs.kernels import padded_rows
from zpp_lab.codecs.layout import Layout
from zpp_lab.codecs.numerics import fold_sum
from zpp_lab.collectives.plan import PassUse, Plan
from zpp_lab.config.wires import GATHERS, Wire
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.models.params import param_class


@dataclass(frozen=True)
class Watch:
    """`errors` collects telemetry; `check` raises NonFiniteError at the first bad value. Ranks are
    those of a cell, whose numbers in the world are `cell`; None: they are the world."""

    errors: ErrorSums | None = None
    check: bool = False
    cell: Sequence[int] | None = None

    def gradient(self, step: int, rank: int, name: str, grad: Tensor) -> None:
        """A rank's gradient before any wire."""
        if self.check and not bool(torch.isfinite(grad).all()):
            own = self.process(rank)
            raise NonFiniteError(
                step, f"the gradient of {name} on rank {own} is not finite before any wire"
            )

    def process(self, rank: int) -> int:
        """Return the rank in the world of one of the cell."""
        return rank if self.cell is None else self.cell[rank]

    def weights(
        self, step: int, wire: Wire, layout: Layout, outs: Sequence[Tensor], rows: int
    ) -> None:
        """Whole parameters after a gather of so many rows."""
        after = [padded_rows(o, rows, g.numel) for g, o in zip(layout.segments, outs, strict=True)]
        self.rows(step, wire, layout, after)

    def rows(
        self,
        step: int,
        wire: Wire,
        layout: Layout,
        after: Sequence[Tensor],
        rank: int | None = None,
    ) -> None:
        """Rows [R, n] of each segment after decoding."""
        for segment, y in zip(layout.segments, after, strict=True):
            if self.check and not bool(torch.isfinite(y).all()):
                who = "" if rank is None else f" from rank {self.process(rank)}"
                raise NonFiniteError(step, f"{wire} delivered NaN for {segment.name}{who}")

    def room(self, layout: Layout, payload: Tensor) -> Tensor | None:
        """For `errors` of `kernels.encode` of this payload: fp64 [R, segments, 9], when wanted."""
        if self.errors is None or not _coded(layout):
            return None
        shape = (payload.shape[0], len(layout.segments), len(SUMS))
        return torch.empty(shape, dtype=torch.float64, device=payload.device)

    def encoded(
        self, wire: Wire, micro: int, ranks: Sequence[int], layout: Layout, errors: Tensor | None
    ) -> None:
        """Take what `kernels.encode` has put into `room`; `ranks`: who encoded each row."""
        if self.errors is None or errors is None:
            return
        for rank in sorted(set(ranks)):
            own = [row for row, r in zip(errors, ranks, strict=True) if r == rank]
            every = fold_sum(torch.stack(own, dim=-1))  # [segments, 9]
            for i in _coded(layout):
                name = layout.segments[i].name
                column = Column(wire, param_class(name), name, micro)
                self.errors.add(column, self.process(rank), every[i])

    def encoded_again(
        self,
        wire: Wire,
        micro: int,
        ranks: Sequence[int],
        layout: Layout,
        before: Sequence[Tensor],
        payload: Tensor,
    ) -> None:
        """The same of sums, rows [R, n] of each segment, for whose encoding there is no `room`."""
        errors = self.room(layout, payload)
        if errors is None:
            return
        for i in _coded(layout):
            segment = layout.segments[i]
            slot = payload[:, segment.offset : segment.offset + segment.nbytes]
            errors[:, i] = error_sums(segment.codec, before[i].float(), slot)
        self.encoded(wire, micro, ranks, layout, errors)

    @property
    def looks(self) -> bool:
        return self.check or self.errors is not None


def unit_not_finite(step: int, norms: Mapping[str, Tensor]) -> NonFiniteError:
    """Return what to raise where units' gradient norms (train.clip_by=unit) are not all finite."""
    bad = min(unit for unit, norm in norms.items() if not bool(torch.isfinite(norm)))
    return NonFiniteError(
        step,
        f"the gradient norm of unit {bad} is not finite, and train.clip_by=unit has updated other "
        "units: resume from the last checkpoint; train.clip_by=norm says where it began",
    )


def gathered_in_vain(plan: Plan, passes: Sequence[PassUse]) -> set[tuple[Wire, str]]:
    """The parameters, and the wires, that these micro-steps did not need: an engine may have
    gathered them ahead."""
    vain: set[tuple[Wire, str]] = set()
    for unit in plan.units:
        for wire, times in zip(GATHERS, unit.gathers(passes), strict=True):
            vain |= set() if times else {(wire, p.name) for p in unit.unit.parameters}
    return vain


def _coded(layout: Layout) -> list[int]:
    """The segments that have a codec. What travels as its own bytes has no codec's error, and
    FSDP2 by itself shows none either."""
    return [i for i, s in enumerate(layout.segments) if not isinstance(s.codec, RawCodec)]
