"""The reduction of a unit's gradients: encode a row for every rank, move, sum in rank order.

One hop: all-to-all over the cluster, then the W rows for this rank's shard are decoded and
added, 0 + row 0 + row 1 + ... Two hops: the same inside the node for the N shards that ranks
of this local rank own, the sums are encoded again, cross between nodes, and are added there.

Hops that share their rotation keep its domain between them: sums are linear, so one inverse at the
end suffices.

On a wire with memories an encoder adds what it remembers to what it encodes: to whole gradients,
and to sums in the domain in which they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zpp_lab.codecs import kernels
from zpp_lab.codecs.kernels import memory
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock, Memories
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.traffic import Traffic, hop_traffic
from zpp_lab.collectives.transport import Link, Shipment, Transport
from zpp_lab.config.schema import Wire

Names = tuple[str, ...]
Chosen = tuple[tuple[Layout, ...], list[Traffic]]  # layouts, and what a rank sends on GRADS
GRADS: tuple[Wire, ...] = ("grads_intra", "grads_inter")


@dataclass(frozen=True)
class ReduceSpec:
    """What a recipe asks of one unit's reductions: the wires crossed, with a layout each.

    `reversed_order`: the last rank's row is added first.
    """

    unit: str
    hops: tuple[Wire, ...]
    layouts: tuple[Layout, ...]
    reversed_order: bool = False


class Reduce:
    """Reductions of one unit by one rank."""

    def __init__(
        self,
        spec: ReduceSpec,
        transport: Transport,
        ledger: Ledger,
        clock: Clock,
        memories: Memories | None = None,
    ) -> None:
        """`memories`: of this rank; None: it remembers nothing."""
        self.transport, self.ledger, self.clock = transport, ledger, clock
        self.memories = memories or Memories({}, ())
        self.spec = replace(spec, layouts=tuple(map(self.memories.bound, spec.layouts)))
        self.cluster, self.rank = transport.cluster, transport.rank
        self.hops = spec.hops
        self.chosen: dict[Names, Chosen] = {}
        self.ways = self._ways()[: len(self.hops)]
        self.labels = [
            f"{wire} of unit {spec.unit} ({way[0]})"
            for wire, way in zip(self.hops, self.ways, strict=True)
        ]
        for (link, rows, members), layout in zip(self.ways, spec.layouts, strict=True):
            self.transport.reserve("exchange", link, rows * members * layout.nbytes)

    def run(self, names: Names, grads: Sequence[Tensor], out: Tensor) -> None:
        """Whole gradients of the named parameters, in layout order → `out` [numel], the sums of
        this rank's padded shards, in out's dtype."""
        layouts, planned = self._chosen(names)
        if self.clock.observer is not None and self.clock.observer.looks:
            self.clock.observer.gradients(layouts[0], grads)
        leg = self._leg(0, layouts[0], grads[0].device)
        self._encode(layouts[0], grads, leg.room)
        sent = [leg.send()]
        if len(layouts) > 1:
            rows = self._in_order(leg.out)
            leg = self._leg(1, layouts[1], grads[0].device)
            self._encode_again(layouts[0], layouts[1], rows, leg.room)
            sent.append(leg.send())
        kernels.reduce(layouts[-1], self._in_order(leg.out), out[None])
        self._account(planned, sent)

    # ------------------------------------------------------------------ parts

    def _chosen(self, names: Names) -> Chosen:
        """The hops' layouts of the parameters that have a gradient, and what a rank sends."""
        if names not in self.chosen:
            present = frozenset(names)
            layouts = tuple(layout.select(present) for layout in self.spec.layouts)
            world, rows = self.cluster.world, [layout.nbytes for layout in layouts]
            every = hop_traffic(self.cluster, self.hops, rows)
            planned = [Traffic(every[w].intra // world, every[w].inter // world) for w in GRADS]
            self.chosen[names] = layouts, planned
        return self.chosen[names]

    def _ways(self) -> list[tuple[Link, int, int]]:
        """For each hop its link, and how many rows go to each of how many members."""
        nodes, local = self.cluster.nodes, self.cluster.gpus_per_node
        if len(self.hops) == 1:
            return [("world", 1, self.cluster.world)]
        return [("local", nodes, local), ("across", 1, nodes)]

    def _leg(self, hop: int, layout: Layout, device: torch.device) -> Shipment:
        link, rows, members = self.ways[hop]
        out = torch.empty(members, rows, layout.nbytes, dtype=torch.uint8, device=device)
        return self.transport.exchanging(out, link, self.labels[hop])

    def _encode(self, layout: Layout, grads: Sequence[Tensor], room: Tensor) -> None:
        """One row for each shard of the cluster, in their order."""
        world, wire, noise = self.cluster.world, self.hops[0], None
        if layout.stochastic:
            noise = self.clock.grads_noise(wire, self.rank, range(world))
        observer = self.clock.observer
        errors = observer.room(wire, layout, room) if observer is not None else None
        kept = self.memories.of(wire, [self.rank])
        if kept is None:
            kernels.encode(layout, grads, noise, room, errors)
        else:
            looked = observer is not None and observer.looks
            grads = memory.encode(layout, grads, noise, room, errors, kept, looked)
        if observer is None:
            return
        observer.encoded(wire, layout, errors)
        if observer.looks:
            pairs = zip(grads, layout.segments, strict=True)
            before = [kernels.padded_rows(g, world, s.numel) for g, s in pairs]
            observer.rows(wire, layout, before, room, self.rank)

    def _encode_again(self, first: Layout, second: Layout, rows: Tensor, room: Tensor) -> None:
        """Rows uint8 [L, N, n] → the sums' rows, uint8 [N, m]: the shards that this local rank
        owns on each node."""
        node, local = divmod(self.rank, self.cluster.gpus_per_node)
        shards = [n * self.cluster.gpus_per_node + local for n in range(self.cluster.nodes)]
        noise = None
        if second.stochastic:
            noise = self.clock.grads_noise(self.hops[1], self.rank, shards)
        kept = self.memories.of(self.hops[1], [self.rank])
        if kept is None:
            kernels.decode_sum_encode(first, second, rows, noise, room)
        if kept is not None or self.clock.observer is not None:
            sums = torch.zeros(len(shards), first.coded_numel, device=room.device)
            kernels.decode_sum(first, rows, sums)
        if kept is not None:
            looked = self.clock.observer is not None
            sums = memory.encode_sums(first, second, sums, noise, room, kept, looked)
            first = memory.between(first, second)
        if self.clock.observer is not None:
            flat = kernels.finish_sums(first, sums)
            before = [flat[:, s.offset_numel : s.offset_numel + s.numel] for s in first.segments]
            sender = node * self.cluster.gpus_per_node
            self.clock.observer.rows(self.hops[1], second, before, room, sender)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows of K senders in the order in which the recipe adds them."""
        return rows.flip(0) if self.spec.reversed_order else rows

    def _account(self, planned: Sequence[Traffic], sent: Sequence[Traffic]) -> None:
        """Into the ledger, if each wire carried what was planned."""
        if len(sent) == 1:  # one hop serves both wires
            sent = [Traffic(sent[0].intra, 0), Traffic(0, sent[0].inter)]
        for wire, own, wanted in zip(GRADS, sent, planned, strict=True):
            self.ledger.add(wire, own)
            if own != wanted:
                raise LedgerError(
                    f"unit {self.spec.unit}, {wire}: rank {self.rank} sent {tuple(own)} bytes, "
                    f"planned {tuple(wanted)}"
                )
