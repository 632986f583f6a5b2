"""Transport between ranks that read each other's memory: each pulls what it needs.

A rank encodes into a slot of shared memory; `slots.py` says when others may read it and when it may
be written again. Copies take the copy engines, so that multiprocessors stay free, and nothing waits
on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zpp_lab.collectives.peer.slots import MIB, Ring, Shared
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import Kind, Link, ProcessGroups, Shipment, members, traffic_of


class PeerTransport:
    """`Transport` over shared memory on the links that have it; `groups` serves the rest, and
    transfers that bring a rank fewer than `least` bytes. shared: makes the memory of a link, on all
    its members at the same time."""

    def __init__(
        self, groups: ProcessGroups, shared: Mapping[Link, Callable[[], Shared]], least: int
    ) -> None:
        self.groups, self.shared, self.least = groups, shared, least
        self.cluster, self.rank, self.watchdog = groups.cluster, groups.rank, groups.watchdog
        self.group = groups.group
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

    def reserve(self, kind: Kind, link: Link, nbytes: int) -> None:
        if link in self.links and len(self.links[link]) > 1:
            ring = self.ring(kind, link)
            ring.wanted = max(ring.wanted, nbytes)

    def watched(self, label: str, device: torch.device) -> AbstractContextManager[Any]:
        return self.groups.watched(label, device)

    def ring(self, kind: Kind, link: Link) -> Ring:
        if (kind, link) not in self.rings:
            ranks = self.links[link]
            own = ranks.index(self.rank)
            self.rings[kind, link] = Ring(self.shared[link](), kind, own, len(ranks))
        return self.rings[kind, link]

    def describe(self) -> str:
        """Describe the transport for the log."""
        names = ", ".join(link for link in self.links if len(self.links[link]) > 1)
        size = f" from {self.least / MIB:g} MiB" if self.least else ""
        return f"peer memory on the links {names}{size}, process groups for the rest"

    def _suits(self, link: Link, nbytes: int) -> bool:
        return nbytes >= self.least and len(self.links.get(link, ())) > 1


class _Copies:
    """A transfer whose sent rows lie in this rank's slot, on the stream of its owner."""

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
        self.part = self.ring.part(self.ring.claim(shape[0] * shape[1] * shape[2]), shape)
        self.room = self.part.room

    def send(self, keep: Tensor | None = None) -> Traffic:
        part = self.part
        watched = self.by.groups.watched(self.label, self.out.device)
        self.ring.ship(part, self.out, self.held, keep, watched)
        if part.traffic is None:
            part.traffic = traffic_of(self.by.cluster, self.link, part.own * part.room.shape[1])
        return part.traffic
