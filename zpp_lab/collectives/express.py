"""A shipment over symmetric memory in one call of the kernels' library.

Marks, the meeting of the ranks and all copies of a shipment are a dozen small steps; through
Python they took the host longer than everything else in a gather. Step by step (`Ring.ship`)
remains for machines without the library. The order of the steps is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zpp_lab.collectives.ring import Part

MOST_SLOTS = 3  # of a ring


class Express:
    """Shipments over one buffer of a link, on this rank's current CUDA device.

    place: this rank's among `count` members; pads: on the device, the address of every member's
    pad of flags, all zero; lane: for copies inside this device.
    """

    def __init__(self, place: int, count: int, pads: int, lane: torch.cuda.Stream) -> None:
        self.place, self.count, self.pads, self.lane = place, count, pads, lane
        self.met = [_event() for _ in range(MOST_SLOTS)]
        self.read, self.home = _event(), _event()
        self.meetings = 0
        self.call = torch.ops.zpp_lab.ship.default

    def route(self, part: Part) -> Tensor:
        """The columns `Route` of cuda/ship.h, then sources and their rows."""
        columns = [
            self.place,
            self.count,
            self.pads,
            part.room.data_ptr(),
            self.read.cuda_event,
            self.met[part.slot].cuda_event,
            self.lane.cuda_stream,
            self.home.cuda_event,
            part.room.shape[1],
            part.own,
        ]
        for source, row in zip(part.sources, part.order, strict=True):
            columns += [source.data_ptr(), row]
        return torch.tensor(columns, dtype=torch.int64)

    def ship(
        self, part: Part, out: Tensor, held: Tensor | None, keep: Tensor | None, watch: int
    ) -> None:
        """Afterwards the slot's `met`, and `read`, stand for this use. watch: a raw event to
        record behind the meeting, or 0."""
        if part.route is None:
            part.route = self.route(part)
        self.meetings += 1
        self.call(out, part.route, self.meetings, watch, held, keep)


def _event() -> torch.cuda.Event:
    """One that exists: torch makes it when it is first recorded."""
    event = torch.cuda.Event()
    event.record()
    return event
