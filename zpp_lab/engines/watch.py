"""Looks at values on the wires when asked: error telemetry, or the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs.errors import ErrorSums
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
                kind = param_class(segment.name)
                self.errors.add(wire, kind, x.float(), y.float(), segment.codec, slot)

    @property
    def looks(self) -> bool:
        return self.check or self.errors is not None
