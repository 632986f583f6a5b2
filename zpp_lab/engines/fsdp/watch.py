"""One rank's look at the wires: error telemetry, or where the first NaN or Inf was.

A rank that meets a bad value must not stop: the others would wait for it for ever. It keeps
its first finding; the engine compares those of all ranks and raises the earliest everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.codecs import kernels
from zpp_lab.codecs.errors import ErrorSums, Telemetry, telemetry
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.transport import Group, all_gather
from zpp_lab.config.wires import BACKWARD, INTER, WIRES, Wire
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.watch import Watch

Place = tuple[int, ...]  # weights or gradients, rank, micro-step, hop, parameter, process


@dataclass(order=True, frozen=True)
class Finding:
    """Orders findings as the virtual engine meets them: weights first, then rank by rank."""

    place: Place
    where: str


@dataclass
class RankWatch:
    """Observes the collectives of one rank in one step (`collectives.clock.Observer`)."""

    step: int
    rank: int
    order: Mapping[str, int] = field(default_factory=dict)  # of the model's parameters
    errors: ErrorSums | None = None
    check: bool = False
    cell: Sequence[int] | None = None  # its ranks' numbers in the world
    micro: int = 0
    first: Finding | None = None
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.errors, self.check, self.cell)

    def at(self, micro: int) -> RankWatch:
        self.micro = micro
        return self

    @property
    def looks(self) -> bool:
        return self.check

    def room(self, wire: Wire, layout: Layout, payload: Tensor) -> Tensor | None:
        return self.watch.room(layout, payload)

    def encoded(self, wire: Wire, layout: Layout, errors: Tensor | None) -> None:
        if errors is not None:
            ranks = [self.rank] * len(errors)
            self.watch.encoded(wire, self._moment(wire), ranks, layout, errors)

    def _moment(self, wire: Wire) -> int:
        """Every micro-step gathers the same."""
        return self.micro if WIRES[wire].pattern in ("hop", "parts", "pipe") else 0

    def weights(self, wire: Wire, layout: Layout, shards: Sequence[Tensor], row: Tensor) -> None:
        if self.micro == 0:
            after = _decoded(layout, row, [s.dtype for s in shards])
            place = (0, int(wire == BACKWARD), 0, 0)
            self._look(place, wire, layout, after)

    def gradients(self, layout: Layout, grads: Sequence[Tensor]) -> None:
        for segment, grad in zip(layout.segments, grads, strict=True):
            try:
                self.watch.gradient(self.step, self.rank, segment.name, grad)
            except NonFiniteError as error:
                self._found((1, self.rank, self.micro, 0), segment.name, error)

    def rows(
        self, wire: Wire, layout: Layout, before: Sequence[Tensor], payload: Tensor, rank: int
    ) -> None:
        # errors decode for themselves, a piece at a time: this is as large as the unit's gradients
        if self.errors is not None:
            ranks = [self.rank] * len(payload)
            self.watch.encoded_again(wire, self.micro, ranks, layout, before, payload)
        if self.check:
            after = _decoded(layout, payload, [torch.float32] * len(before))
            place = (1, rank, self.micro, 2 if wire == INTER else 1)
            self._look(place, wire, layout, after, rank)

    def means(self, grads: Mapping[str, Tensor]) -> None:
        """This rank's shards of mean gradients: all that is seen of an untouched FSDP2."""
        for name, grad in grads.items():
            if not bool(torch.isfinite(grad).all()):
                error = NonFiniteError(self.step, f"the mean gradient of {name} is not finite")
                self._found((2, 0, 0, 0), name, error)

    def _look(
        self,
        place: Place,
        wire: Wire,
        layout: Layout,
        after: Sequence[Tensor],
        rank: int | None = None,
    ) -> None:
        for segment, values in zip(layout.segments, after, strict=True):
            try:
                self.watch.rows(self.step, wire, Layout((segment,)), [values], rank)
            except NonFiniteError as error:
                self._found(place, segment.name, error)

    def _found(self, place: Place, name: str, error: NonFiniteError) -> None:
        where = str(error).split(": ", 1)[1]
        process = self.watch.process(self.rank)
        finding = Finding((*place, self.order.get(name, 0), process), where)
        if self.first is None or finding < self.first:
            self.first = finding


def _decoded(layout: Layout, payload: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    rows = payload.shape[0]
    outs = [
        torch.empty(rows, s.numel, dtype=dtype, device=payload.device)
        for s, dtype in zip(layout.segments, dtypes, strict=True)
    ]
    kernels.decode(layout, payload, outs)
    return outs


def refuse(watch: RankWatch, group: Group = None) -> NoReturn:
    """Raise NonFiniteError on all ranks, with the first finding of any."""
    found: list[Finding | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, watch.first, group=group)
    first = min((f for f in found if f is not None), default=None)
    where = "the gradient norm overflowed although every gradient is finite"
    raise NonFiniteError(watch.step, first.where if first else where)


def telemetry_of_all(errors: ErrorSums) -> Telemetry:
    """As `merged_telemetry`, where ranks have other parameters than each other."""
    columns, own = errors.by_rank()
    rows = [] if own is None else list(zip(columns, own[0].cpu(), strict=True))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    merged = ErrorSums()
    for rank, found in enumerate(every):
        for column, sums in found:
            merged.add(column, rank, sums)
    return telemetry(*merged.by_rank())


def merged_telemetry(errors: ErrorSums, device: torch.device, group: Group = None) -> Telemetry:
    """The telemetry of all ranks together; alike on every rank."""
    columns, own = errors.by_rank()
    if own is None:
        return {}
    own = own[0].to(device)
    every = torch.empty(dist.get_world_size(group), *own.shape, dtype=own.dtype, device=device)
    all_gather(every.view(-1), own.view(-1), group=group)
    return telemetry(columns, every)
