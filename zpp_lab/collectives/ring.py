"""The slots in which the ranks of a link find each other's rows.

A rank encodes into a slot of shared memory. Once all members of the link have done so, which a
barrier on the device tells (they meet), each reads its rows in the others' slots: copies bring
them here, or the kernel that decodes or sums them reads them where they lie (`Unread`), later and
on another stream.

Use k of a ring of s slots lies in slot k mod s. What keeps a slot from being overwritten while
somebody still reads it:

    `read` is a mark behind all reads that this rank has asked for, whatever stream they are on:
    each new one comes behind the mark before it. A rank passes a meeting only behind `read`.
    So the first meeting that comes after a rank asked for its reads of use k tells the others
    that it has finished them. A rank writes use k + s only behind that meeting.

With copies the reads of use k are asked for at once, and that meeting is the one of use k + 1.
Kernels read when the owner decodes, so it may be a later one; there may be none yet (the ranks
then meet once more), or the reads may not even have been asked for (then copies do it: `settle`).
Every rank decides this from the calls it has made, never from a clock or a device. All ranks make
the same shipments and readings in the same order, as with any collective, so all decide alike.

Meetings are numbered, and ranks meet in the order of their numbers: each comes behind `read`, or
behind the meeting before it where that one's use is still unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zpp_lab.collectives.express import Express
from zpp_lab.collectives.streams import Streams
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import Kind, kept_rows
from zpp_lab.collectives.watchdog import Watch
from zpp_lab.ops import Rows, senders

# With a third slot a gather's encode does not wait for the meeting of the gather before it, which
# comes when the slowest rank does. A slot of an exchange is as large as a unit, so it has two.
SLOTS: dict[Kind, int] = {"gather": 3, "exchange": 2}
MIB = 2**20
FREE = -1  # a slot that nobody ever read
Watched = AbstractContextManager[Watch | None]


class Shared(Protocol):
    """Memory of one link that every member reads. All members make the same calls."""

    streams: Streams

    def allocate(self, nbytes: int) -> Sequence[Tensor]:
        """A buffer uint8 [nbytes] of every member, in their order; the host waits for all of
        them. What was allocated before is given up: nothing on this device may use it."""
        ...

    def express(self) -> Express | None:
        """For shipments over what was just allocated; None: they go step by step, by `barrier`
        and `pull`. All members of a link have the same."""
        ...

    def barrier(self) -> None:
        """The current stream goes on once every member's has come here."""
        ...

    def pull(self, outs: Sequence[Tensor], sources: Sequence[Tensor], own: int) -> None:
        """Copies on the current stream, int64, each source in some member's buffer, the first
        `own` of them in this rank's."""
        ...


@dataclass(slots=True)
class Part:
    """A shipment's place in a slot: this rank's room there, and where its rows come from.

    sources: the `own` rows first, then each other member's, so that at any time the ranks read
    from different ones, as int64; `order` has their places in `out`, flat. `route`: the same for
    `Express`.
    """

    room: Tensor
    slot: int
    own: int
    sources: tuple[Tensor, ...]
    order: tuple[int, ...]
    route: Tensor | None = None
    rows: Rows | None = None  # for kernels
    traffic: Traffic | None = None  # of every shipment from here


class Unread(Protocol):
    """A use whose rows lie in the members' slots until somebody reads them."""

    def settle(self) -> None:
        """Copy them on the current stream: the slot is wanted."""
        ...


class Ring:
    """The slots of one link for one kind of shipment, of `count` members; `own` is this rank's
    place among them, `share` the multiprocessors of a kernel that reads rows where they lie."""

    def __init__(self, shared: Shared, kind: Kind, own: int, count: int, share: int = 0) -> None:
        self.shared, self.kind, self.own, self.count = shared, kind, own, count
        self.share = share
        self.wanted = self.size = 0
        self.slots = SLOTS[kind]
        self.buffers: Sequence[Tensor] = ()
        self._reset(None)

    def _reset(self, express: Express | None) -> None:
        """Nobody has written a slot yet."""
        self.express = express
        self.use, self.opened = -1, True  # the latest use, and whether its meeting is under way
        self.barriers: list[Any] = [None] * (self.slots + 1)  # marks behind meetings, by slot;
        # the last one: behind a meeting without a use
        self.last: int | None = None  # of the latest meeting, its place there
        self.freed: list[int | None] = [FREE] * self.slots  # the place there of the first meeting
        # behind the reads of the slot's latest use; None: there is none yet
        self.unread: list[Unread | None] = [None] * self.slots
        self.read: Any = express.read if express is not None else None
        self.parts: dict[tuple[int, ...], Part] = {}

    def claim(self, nbytes: int) -> int:
        """A slot of at least `nbytes` that the current stream may write; where it starts."""
        if nbytes > self.size:
            self._grow(max(nbytes, self.wanted))
        self.use += self.opened  # a use that was never sent is used again
        self.opened = False
        slot = self.use % self.slots
        self._vacate(slot)
        return slot * self.size

    def _vacate(self, slot: int) -> None:
        """The current stream goes on once all members have read the slot."""
        late = self.unread[slot]
        if late is not None:
            late.settle()
        if self.freed[slot] is None:
            self._meet_again()
        freed = self.freed[slot]
        assert freed is not None, "a meeting frees what was read before it"
        if freed != FREE and self.barriers[freed] is not None:
            self.shared.streams.wait(self.barriers[freed])

    def ship(
        self, part: Part, out: Tensor, held: Tensor | None, keep: Tensor | None, watched: Watched
    ) -> None:
        """The room of this use is filled, or shall have `held`: every member's rows → `out`,
        some of which `keep` gets too. `watched`: around the meeting of the ranks."""
        self.opened = True
        if self.express is not None:
            self._behind_last()
            with watched as watch:
                event = watch.own_event() if watch is not None else 0
                self.express.ship(part, out, held, keep, event)
            self._met(part.slot, self.express.met[part.slot])
        else:
            self._meet(part, held, watched)
            self.copy(part, out)
            if keep is not None:
                kept_rows(keep, out, self.own)
            self.read = self.shared.streams.mark(self.read)
        self.freed[part.slot] = None

    def show(self, part: Part, unread: Unread, held: Tensor | None, watched: Watched) -> None:
        """The room of this use is filled, or shall have `held`: every member may read it."""
        self.opened = True
        self._meet(part, held, watched)
        self.freed[part.slot], self.unread[part.slot] = None, unread

    def await_rows(self, part: Part) -> None:
        """The current stream goes on once all members have filled their rooms of this use."""
        self.shared.streams.wait(self.barriers[part.slot])

    def copy(self, part: Part, out: Tensor) -> None:
        """The rows of this use → `out`, on the current stream."""
        words = out.view(-1, part.room.shape[1]).view(torch.int64).unbind(0)
        self.shared.pull([words[i] for i in part.order], part.sources, part.own)

    def asked(self, part: Part | None = None) -> None:
        """Reads of shown rows lie on the current stream. `part`: there will be no more of it."""
        if self.read is not None:
            self.shared.streams.wait(self.read)
        self.read = self.shared.streams.mark(self.read)
        if part is not None:
            self.unread[part.slot] = None

    def _meet(self, part: Part, held: Tensor | None, watched: Watched) -> None:
        """What this rank wrote on the current stream may be read, and so may the others'."""
        self._behind_last()
        if self.express is not None:
            with watched as watch:
                event = watch.own_event() if watch is not None else 0
                self.express.meet(part, held, event)
            return self._met(part.slot, self.express.met[part.slot])
        if held is not None:
            part.room.copy_(held)
        with watched:
            self._barrier(part.slot)

    def _meet_again(self) -> None:
        """All members' reads so far have been asked for, but none has told the others since."""
        self._behind_last()
        if self.express is not None:
            self.express.meet_again(self.buffers[self.own])
            return self._met(self.slots, self.express.met[-1])
        self._barrier(self.slots)

    def _barrier(self, place: int) -> None:
        if self.read is not None:
            self.shared.streams.wait(self.read)
        self.shared.barrier()
        self._met(place, self.shared.streams.mark(self.barriers[place]))

    def _behind_last(self) -> None:
        """Where `read` does not lie behind the latest meeting, the current stream waits for it."""
        last = self.last
        if last is not None and (last == self.slots or self.unread[last] is not None):
            self.shared.streams.wait(self.barriers[last])

    def _met(self, place: int, mark: Any) -> None:
        """A meeting is under way: it frees every slot whose reads were asked for before it."""
        self.barriers[place], self.last = mark, place
        for slot, freed in enumerate(self.freed):
            if freed is None and self.unread[slot] is None:
                self.freed[slot] = place

    def part(self, at: int, shape: tuple[int, int, int]) -> Part:
        """The place of rows × columns × bytes that starts at `at`; made once."""
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

    def rows(self, part: Part) -> Rows:
        """What a kernel reads of this use; made once."""
        if part.rows is None:
            part.rows = self._rows(part)
        return part.rows

    def _rows(self, part: Part) -> Rows:
        if self.kind == "gather":
            sources = tuple(s.view(torch.uint8) for s in part.sources)
            return Rows(sources, part.order, part.own, self.share)
        start = part.slot * self.size
        rows, shape = part.own, (part.own, self.count, part.room.shape[1])
        end = start + part.room.numel()
        assert part.room.shape[0] == rows * self.count, "a row of each kind for each member"
        return senders([b[start:end].view(shape)[:, self.own] for b in self.buffers], self.share)

    def _grow(self, nbytes: int) -> None:
        for late in self.unread:
            if late is not None:
                late.settle()  # `allocate` waits for the device
        self.size = -(-nbytes // 256) * 256
        self.parts, self.buffers = {}, ()
        self.buffers = self.shared.allocate(self.slots * self.size)
        self._reset(self.shared.express())
