"""The slots in which the ranks of a link find each other's rows, and a transfer through one.

A rank encodes into a slot of shared memory. Once all members of the link have done so, which a
barrier on the device tells (they meet), each copies its rows out of the others' slots.

Use k of a ring of s slots lies in slot k mod s, and two rules keep a slot from being overwritten
while somebody still reads it:

    a rank passes the meeting of use k only after its own reads of use k - 1;
    it writes use k only after the meeting of use k - s + 1, hence after all reads of use k - s.

All ranks make the same transfers in the same order, as with any collective. Units travel whole:
overlapping parts put ranks out of step, and lost time.

Marks, the meeting of the ranks and all copies of a transfer are a dozen small steps. Through Python
they took the host longer than everything else in a gather, so over symmetric memory the kernels'
library does them in one call (`Express`). Machines without the library take the same steps, in the
same order, one by one (`Ring.ship`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import Kind, Streams, kept_rows
from zpp_lab.collectives.watchdog import Watch

MOST_SLOTS = 3  # of a ring
# With a third slot a gather's encode does not wait for the meeting of the gather before it, which
# comes when the slowest rank does. A slot of an exchange is as large as a unit, so it has two.
SLOTS: dict[Kind, int] = {"gather": 3, "exchange": 2}
MIB = 2**20
Watched = AbstractContextManager[Watch | None]


class Express:
    """Transfers over one buffer of a link, on this rank's current CUDA device. place: this rank's
    among `count` members; pads: on the device, the address of every member's pad of flags, all
    zero; lane: the stream for copies inside this device; meetings: int32 [1] on the device, zero,
    which counts the ranks' meetings."""

    def __init__(
        self, place: int, count: int, pads: int, lane: torch.cuda.Stream, meetings: Tensor
    ) -> None:
        self.place, self.count, self.pads, self.lane = place, count, pads, lane
        self.met = [_event() for _ in range(MOST_SLOTS)]
        self.read, self.home = _event(), _event()
        self.meetings = meetings
        self.call = torch.ops.zpp_lab.ship.default

    def route(self, part: Part) -> Tensor:
        """Return the columns `Route` of cuda/peer/ship.h, then sources and their rows."""
        columns = [
            self.place,
            self.count,
            self.pads,
            self.meetings.data_ptr(),
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
        """Transfer; afterwards the slot's `met`, and `read`, stand for this use. watch: a raw event
        to record behind the meeting, or 0."""
        if part.route is None:
            part.route = self.route(part)
        self.call(out, part.route, watch, held, keep)

    def rebase(self) -> None:
        """Let all events stand for this point of the current stream."""
        for event in (*self.met, self.read, self.home):
            event.record()


def _event() -> torch.cuda.Event:
    """Return an event that exists: torch makes it when it is first recorded."""
    event = torch.cuda.Event()
    event.record()
    return event


class Shared(Protocol):
    """Memory of one link that every member reads. All members make the same calls."""

    streams: Streams

    def allocate(self, nbytes: int) -> Sequence[Tensor]:
        """Allocate a buffer uint8 [nbytes] of every member, in their order; the host waits for all
        of them. The former one is given up: nothing on this device may use it."""
        ...

    def express(self) -> Express | None:
        """Return the transfers over the allocated memory; None: step by step. Equal on all
        members."""
        ...

    def barrier(self) -> None:
        """Let the current stream wait until every member's has come here."""
        ...

    def pull(self, outs: Sequence[Tensor], sources: Sequence[Tensor], own: int) -> None:
        """Copy on the current stream, int64; the first `own` sources lie in this rank's buffer."""
        ...


@dataclass(slots=True)
class Part:
    """A transfer's place in a slot: this rank's rows there, and where the received rows come from.
    sources: the `own` rows first, then each other member's, so that at any time the ranks read from
    different ones, as int64; `order` has their places in `out`, flat. `route`: the same for
    `Express`."""

    room: Tensor
    slot: int
    own: int
    sources: tuple[Tensor, ...]
    order: tuple[int, ...]
    route: Tensor | None = None
    traffic: Traffic | None = None  # of every transfer from here


class Ring:
    """The slots of one link for one kind of transfer; this rank is `own` of `count` members."""

    def __init__(self, shared: Shared, kind: Kind, own: int, count: int) -> None:
        self.shared, self.kind, self.own, self.count = shared, kind, own, count
        self.wanted = self.size = self.made = 0  # `made`: how often buffers were
        self.slots = SLOTS[kind]
        self.buffers: Sequence[Tensor] = ()
        self._reset(None)

    def _reset(self, express: Express | None) -> None:
        """Mark every slot as unwritten."""
        self.express = express
        self.use, self.opened = -1, True  # the latest use, and whether its meeting is under way
        self.barriers: list[Any] = [None] * self.slots  # marks behind meetings, by slot
        self.read: Any = None  # the mark behind this rank's reads of the latest use
        self.parts: dict[tuple[int, ...], Part] = {}

    def claim(self, nbytes: int) -> int:
        """Claim a slot of `nbytes` that the current stream may write; returns its start."""
        if nbytes > self.size:
            self._grow(max(nbytes, self.wanted))
        self.use += self.opened  # a use that was never sent is used again
        self.opened = False
        barrier = self.barriers[(self.use + 1) % self.slots]
        if barrier is not None:
            self.shared.streams.wait(barrier)
        return self.use % self.slots * self.size

    def ship(
        self, part: Part, out: Tensor, held: Tensor | None, keep: Tensor | None, watched: Watched
    ) -> None:
        """Transfer every member's rows into `out`, and some into `keep`, once this rank's slot is
        filled, or from `held`. `watched`: around the meeting of the ranks."""
        self.opened = True
        if self.express is not None:
            with watched as watch:
                event = watch.own_event() if watch is not None else 0
                self.express.ship(part, out, held, keep, event)
            self.barriers[part.slot] = self.express.met[part.slot]
            return
        if held is not None:
            part.room.copy_(held)
        with watched:
            if self.read is not None:
                self.shared.streams.wait(self.read)
            self.shared.barrier()
            self.barriers[part.slot] = self.shared.streams.mark(self.barriers[part.slot])
        words = out.view(-1, part.room.shape[1]).view(torch.int64).unbind(0)
        self.shared.pull([words[i] for i in part.order], part.sources, part.own)
        if keep is not None:
            kept_rows(keep, out, self.own)
        self.read = self.shared.streams.mark(self.read)

    def part(self, at: int, shape: tuple[int, int, int]) -> Part:
        """Return the place of rows × columns × bytes that starts at `at`; cached."""
        found = self.parts.get((at, *shape))
        if found is None:
            found = self.parts[at, *shape] = self._part(at, shape)
        return found

    def _part(self, at: int, shape: tuple[int, int, int]) -> Part:
        rows, columns, each = shape
        sources, order = [], []
        for member in ((self.own + i) % self.count for i in range(self.count)):
            room = self.buffers[member][at : at + rows * columns * each].view(shape)
            room = room.view(torch.int64)
            for row in range(rows):
                if self.kind == "gather":
                    sources.append(room[row, 0])
                    order.append(row * self.count + member)
                else:
                    sources.append(room[row, self.own])
                    order.append(member * rows + row)
        mine = self.buffers[self.own][at : at + rows * columns * each]
        room = mine.view(rows * columns, each)
        return Part(room, at // self.size, rows, tuple(sources), tuple(order))

    def rebase(self, meet: bool) -> None:
        """Start over at this point of the current stream, behind which all of this rank's uses lie:
        a CUDA graph may wait for no mark from outside, and nobody for one of its marks. `meet`: the
        others have come to this point, too, so that every slot may be written."""
        if not self.buffers:
            return
        if meet:
            self.shared.barrier()
        if self.express is not None:
            self.express.rebase()
        else:
            self.barriers = [
                None if mark is None else self.shared.streams.mark(mark) for mark in self.barriers
            ]
            self.read = None if self.read is None else self.shared.streams.mark(self.read)

    def _grow(self, nbytes: int) -> None:
        self.size = -(-nbytes // 256) * 256
        self.parts, self.buffers = {}, ()  # `allocate` gives up what was there
        self.buffers, self.made = self.shared.allocate(self.slots * self.size), self.made + 1
        self._reset(self.shared.express())
