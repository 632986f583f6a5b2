"""Looks at values on the wires when asked: error telemetry, or the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs.errors import SUMS, ErrorSums, error_sums
from zpp_lab.config import Wire
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.layout import Layout
from zpp_lab.models.params import param_class
from zpp_lab.ops import padded_rows


@dataclass(frozen=True)
class Watch:
    """`errors` collects telemetry; `check` raises NonFiniteError at the first bad value."""

    errors: ErrorSums | None = None
    check: bool = False

    def gradient(self, step: int, rank: int, name: str, grad: Tensor) -> None:
        """A rank's gradient before any wire."""
        if self.check and not bool(torch.isfinite(grad).all()):
            raise NonFiniteError(
                step, f"the gradient of {name} on rank {rank} is not finite before any wire"
            )

    def weights(
        self,
        step: int,
        wire: Wire,
        layout: Layout,
        sources: Sequence[Tensor],
        outs: Sequence[Tensor],
        payload: Tensor,
    ) -> None:
        """Whole parameters before and after a gather."""
        rows = payload.shape[0]
        before = [
            padded_rows(s, rows, g.numel) for g, s in zip(layout.segments, sources, strict=True)
        ]
        after = [padded_rows(o, rows, g.numel) for g, o in zip(layout.segments, outs, strict=True)]
        self.rows(step, wire, layout, before, after, payload)

    def rows(
        self,
        step: int,
        wire: Wire,
        layout: Layout,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        payload: Tensor,
        rank: int | None = None,
    ) -> None:
        """Rows [R, n] of each segment before encoding and after decoding."""
        for segment, x, y in zip(layout.segments, before, after, strict=True):
            if self.check and not bool(torch.isfinite(y).all()):
                who = "" if rank is None else f" from rank {rank}"
                raise NonFiniteError(step, f"{wire} brought NaN for {segment.name}{who}")
            if self.errors is not None:
                slot = payload[:, segment.offset : segment.offset + segment.nbytes]
                sums = error_sums(segment.codec, x.float(), slot)
                self.errors.add(wire, param_class(segment.name), sums)

    def room(self, layout: Layout, payload: Tensor) -> Tensor | None:
        """For the `errors` of `ops.encode` of this payload: fp64 [R, segments, 9], when wanted."""
        if self.errors is None:
            return None
        shape = (payload.shape[0], len(layout.segments), len(SUMS))
        return torch.empty(shape, dtype=torch.float64, device=payload.device)

    def encoded(self, wire: Wire, layout: Layout, errors: Tensor | None) -> None:
        """Take what `ops.encode` has put into `room`, in place of `rows`' own sums."""
        if self.errors is not None and errors is not None:
            for segment, sums in zip(layout.segments, errors.unbind(1), strict=True):
                self.errors.add(wire, param_class(segment.name), sums)

    @property
    def looks(self) -> bool:
        return self.check or self.errors is not None
