"""Transport between ranks that read each other's memory: each pulls what it needs.

A rank encodes into a slot of shared memory; `ring.py` says when others may read it and when it may
be written again. Its rows are copied, or read in place by the kernel that decodes or sums them
(`pulls.py`). Copies take the copy engines, so that multiprocessors stay free. Nothing waits on the
host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zpp_lab.collectives.pulls import Pulls
from zpp_lab.collectives.ring import MIB, Ring, Shared
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import (
    Kind,
    Link,
    ProcessGroups,
    Shipment,
    members,
    traffic_of,
)
from zpp_lab.ops import Payload


class PeerTransport:
    """`Transport` over shared memory on the links that have it; `groups` serves the rest, and
    shipments that bring a rank fewer than `least` bytes.

    shared: makes the memory of a link, on all its members at the same time. choice: which
    shipments kernels read in place; alike on all ranks.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        shared: Mapping[Link, Callable[[], Shared]],
        least: int,
        choice: Pulls | None = None,
    ) -> None:
        self.groups, self.shared, self.least = groups, shared, least
        self.choice = choice or Pulls()
        self.cluster, self.rank = groups.cluster, groups.rank
        self.links = {link: members(self.cluster, link, self.rank) for link in shared}
        self.rings: dict[tuple[Kind, Link], Ring] = {}

    def gathering(
        self, out: Tensor, link: Link, label: str, held: Tensor | None = None
    ) -> Shipment:
        if not self._suits(link, out.numel()):
            return self.groups.gathering(out, link, label, held)
        shape = (out.shape[0] // len(self.links[link]), 1, out.shape[1])
        return _Copies(self, "gather", link, label, out, shape, held)

    def exchanging(self, out: Tensor, link: Link, label: str) -> Shipment:
        if not self._suits(link, out.numel()):
            return self.groups.exchanging(out, link, label)
        shape = (out.shape[1], out.shape[0], out.shape[2])
        return _Copies(self, "exchange", link, label, out, shape, None)

    def pulls(self, kind: Kind, link: Link, shape: tuple[int, ...]) -> bool:
        nbytes, count = math.prod(shape), len(self.links.get(link, ()))
        rows = shape[0] if kind == "gather" else count
        return self._suits(link, nbytes) and self.choice.by_kernel(kind, count, rows, nbytes)

    def pulling(
        self,
        kind: Kind,
        link: Link,
        shape: tuple[int, ...],
        label: str,
        held: Tensor | None = None,
    ) -> Shipment:
        return _Shown(self, kind, link, label, shape, held)

    def reserve(self, kind: Kind, link: Link, nbytes: int) -> None:
        if link in self.links and len(self.links[link]) > 1:
            ring = self.ring(kind, link)
            ring.wanted = max(ring.wanted, nbytes)

    def ring(self, kind: Kind, link: Link) -> Ring:
        if (kind, link) not in self.rings:
            ranks = self.links[link]
            own = ranks.index(self.rank)
            share = self.choice.share(kind)
            self.rings[kind, link] = Ring(self.shared[link](), kind, own, len(ranks), share)
        return self.rings[kind, link]

    def describe(self) -> str:
        """For the log."""
        names = ", ".join(link for link in self.links if len(self.links[link]) > 1)
        size = f" from {self.least / MIB:g} MiB" if self.least else ""
        pulled = self.choice.describe()
        return f"peer memory on the links {names}{size}{pulled}, process groups for the rest"

    def _suits(self, link: Link, nbytes: int) -> bool:
        return nbytes >= self.least and len(self.links.get(link, ())) > 1


class _Copies:
    """A shipment whose room lies in this rank's slot, on the stream of its owner."""

    __slots__ = ("by", "held", "label", "link", "out", "part", "ring", "room")

    def __init__(
        self,
        by: PeerTransport,
        kind: Kind,
        link: Link,
        label: str,
        out: Tensor,
        shape: tuple[int, int, int],
        held: Tensor | None,
    ) -> None:
        self.by, self.link, self.label, self.out, self.held = by, link, label, out, held
        self.ring = by.ring(kind, link)
        at = self.ring.claim(shape[0] * shape[1] * shape[2])
        self.part = self.ring.part(at, shape)
        self.room = self.part.room

    def send(self, keep: Tensor | None = None) -> Traffic:
        watched = self.by.groups.watched(self.label, self.out.device)
        self.ring.ship(self.part, self.out, self.held, keep, watched)
        return self.traffic()

    def traffic(self) -> Traffic:
        part = self.part
        if part.traffic is None:
            nbytes = part.own * part.room.shape[1]
            part.traffic = traffic_of(self.by.cluster, self.link, nbytes)
        return part.traffic

    def reading(self) -> AbstractContextManager[Payload]:
        return nullcontext(self.out)


class _Shown(_Copies):
    """One whose rows stay in the members' slots until they are read there, or until the slot is
    wanted. shape: of what arrives."""

    __slots__ = ("copied", "here", "shape", "state")

    def __init__(
        self,
        by: PeerTransport,
        kind: Kind,
        link: Link,
        label: str,
        shape: tuple[int, ...],
        held: Tensor | None,
    ) -> None:
        count = len(by.links[link])
        own = (shape[0] // count, 1) if kind == "gather" else (shape[1], count)
        none = torch.empty(0, dtype=torch.uint8)
        super().__init__(by, kind, link, label, none, (*own, shape[-1]), held)
        self.shape, self.state = shape, "new"
        self.here: Tensor | None = None  # the rows, once copied
        self.copied: object = None  # the mark behind that

    def send(self, keep: Tensor | None = None) -> Traffic:
        watched = self.by.groups.watched(self.label, self.room.device)
        self.ring.show(self.part, self, self.held, watched)
        self.state = "shown"
        if keep is not None:
            self._keep(keep)
        return self.traffic()

    def reading(self) -> AbstractContextManager[Payload]:
        assert self.state in ("shown", "copied"), "rows are read once, after they were sent"
        return _Reading(self)

    def settle(self) -> None:
        ring, part = self.ring, self.part
        ring.await_rows(part)
        self.here = part.room.new_empty(self.shape)
        ring.copy(part, self.here)
        ring.asked(part)
        self.copied, self.state = ring.shared.streams.mark(), "copied"

    def _keep(self, keep: Tensor) -> None:
        """As `kept_rows` of what arrives; the stream that met reads them."""
        part, count = self.part, self.shape[0]
        step = count // keep.shape[0]
        wanted = range(self.ring.own % step, count, step)
        words = keep.view(torch.int64).unbind(0)
        sources = [part.sources[part.order.index(row)] for row in wanted]
        self.ring.shared.pull(words, sources, 0)
        self.ring.asked()


class _Reading:
    """The body reads a shipment's rows on the current stream."""

    __slots__ = ("of",)

    def __init__(self, of: _Shown) -> None:
        self.of = of

    def __enter__(self) -> Payload:
        of = self.of
        if of.here is not None:  # made on whichever stream wanted the slot
            of.ring.shared.streams.wait(of.copied)
            if of.here.is_cuda:
                of.here.record_stream(torch.cuda.current_stream())
            return of.here
        of.ring.await_rows(of.part)
        return of.ring.rows(of.part)

    def __exit__(self, *_: object) -> None:
        of = self.of
        if of.here is None:
            of.ring.asked(of.part)
        of.state, of.here = "read", None
