"""The reduction of a unit's gradients: encode a row for every rank, move, sum in rank order.

One hop: all-to-all over the cluster, then the W rows for this rank's shard are decoded and
added, 0 + row 0 + row 1 + ... Two hops: the same inside the node for the N shards that ranks
of this local rank own, the sums are encoded again, cross between nodes, and are added there.

Where several ranks have the same part of the optimizer (`cut` is L, a node's) the second hop is a
gather: the ranks of equal place get each other's encoded sums, and all of them decode all N in node
order, their own too. Where every rank has the whole of it, a third hop encodes what came out and
gathers it in the node. So every copy ends with equal bits: it has decoded equal payloads.

With `in_node` the sums of a step's micro-steps stay in the node, and go on from one to the next;
the second hop waits for the last.

Hops that share their rotation keep its domain between them: sums are linear, so one inverse at the
end suffices.

On a wire with memories an encoder adds what it remembers to what it encodes: to whole gradients,
and to sums in the domain in which they are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs import kernels
from zpp_lab.codecs.kernels import memory
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock, Memories
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.traffic import Traffic, hop_traffic
from zpp_lab.collectives.transport import Kind, Link, Shipment, Transport
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.config.wires import Wire

Names = tuple[str, ...]
# layouts, and what a rank sends: of one hop on both wires, else hop by hop
Chosen = tuple[tuple[Layout, ...], list[tuple[Wire, Traffic]]]


@dataclass(frozen=True)
class ReduceSpec:
    """What a recipe asks of one unit's reductions: the wires crossed, with a layout each.

    `reversed_order`: the last rank's row is added first. `cut`: into how many parts, 0 is one a
    rank. `in_node`: sums stay in the node until the step's last micro-step.
    """

    unit: str
    hops: tuple[Wire, ...]
    layouts: tuple[Layout, ...]
    reversed_order: bool = False
    cut: int = 0
    in_node: bool = False


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
        self.spec = spec
        self.cluster, self.rank = transport.cluster, transport.rank
        self.hops, self.cut = spec.hops, spec.cut or self.cluster.world
        self.chosen: dict[Names, Chosen] = {}
        self.sums: Tensor | None = None  # of the micro-steps before, which stay in the node
        self.summed: Names = ()  # whose
        self.ways = ways(self.cluster, len(self.hops), self.cut)
        self.labels = [
            f"{wire} of unit {spec.unit} ({way[1]})"
            for wire, way in zip(self.hops, self.ways, strict=True)
        ]
        for (kind, link, rows, members), layout in zip(self.ways, spec.layouts, strict=True):
            count = rows * members if kind == "exchange" else rows
            self.transport.reserve(kind, link, count * layout.nbytes)

    def start_step(self) -> None:
        """Forget sums of a step that has failed."""
        self.sums = None

    def run(self, names: Names, grads: Sequence[Tensor], out: Tensor) -> None:
        """Whole gradients of the named parameters, in layout order → `out` [numel], the sums of
        this rank's padded shards, in out's dtype."""
        send, finish = self.begin(names, grads)
        send()
        finish(out)

    def begin(
        self, names: Names, grads: Sequence[Tensor]
    ) -> tuple[Callable[[], None], Callable[[Tensor], None]]:
        """`run` up to where the last row is encoded; the rest in two: send it, and decode what has
        arrived into `out`."""
        layouts, planned = self._chosen(names)
        if self.clock.observer is not None and self.clock.observer.looks:
            self.clock.observer.gradients(layouts[0], grads)
        leg = self._leg(0, layouts[0], grads[0].device)
        self._encode(layouts[0], grads, leg.room)
        sent = []
        for hop in range(1, len(layouts)):
            sent.append(leg.send())
            if hop == 1 and self._stays(names, layouts[0], leg.out):
                self._account(planned[:1], sent)
                # what comes with the last micro-step is added to it
                return lambda: None, lambda out: out.zero_()  # type: ignore[return-value]
            rows, before = self._in_order(leg.out), layouts[hop - 1]
            leg = self._leg(hop, layouts[hop], grads[0].device)
            self._encode_again(hop, before, layouts[hop], rows, leg.room)
        sizes = [g.numel() for g in grads]

        def send() -> None:
            self._account(planned, [*sent, leg.send()])

        def finish(out: Tensor) -> None:
            if len(layouts) == 3:
                kernels.decode(layouts[-1], leg.out, out.split(sizes))
            else:
                kernels.reduce(layouts[-1], self._in_order(self._rows(leg.out)), out[None])

        return send, finish

    # ------------------------------------------------------------------ parts

    def _chosen(self, names: Names) -> Chosen:
        """The hops' layouts of the parameters that have a gradient, and what a rank sends."""
        if names not in self.chosen:
            present = frozenset(names)
            layouts = tuple(layout.select(present) for layout in self.spec.layouts)
            world, rows = self.cluster.world, [layout.nbytes for layout in layouts]
            every = hop_traffic(self.cluster, self.hops, rows, self.cut)
            planned = [(w, Traffic(t.intra // world, t.inter // world)) for w, t in every]
            self.chosen[names] = layouts, planned
        return self.chosen[names]

    def _leg(self, hop: int, layout: Layout, device: torch.device) -> Shipment:
        kind, link, rows, members = self.ways[hop]
        shape = (members, rows, layout.nbytes) if kind == "exchange" else (members, layout.nbytes)
        out = torch.empty(shape, dtype=torch.uint8, device=device)
        if kind == "gather":
            return self.transport.gathering(out, link, self.labels[hop])
        return self.transport.exchanging(out, link, self.labels[hop])

    def _rows(self, out: Tensor) -> Tensor:
        """What a hop brought, uint8 [K, R, nbytes] of K senders."""
        return out if out.dim() == 3 else out[:, None]

    def _stays(self, names: Names, layout: Layout, rows: Tensor) -> bool:
        """Add rows uint8 [L, R, n] to the sums in the node, if they wait for other micro-steps;
        whether they still do."""
        last = self.clock.last
        if not self.spec.in_node or (last and self.sums is None):
            return False
        if self.sums is None:
            self.sums = torch.zeros(rows.shape[1], layout.coded_numel, device=rows.device)
            self.summed = names
        if names != self.summed:
            raise ValueError(uneven(set(names) ^ set(self.summed)))
        kernels.decode_sum(layout, self._in_order(rows), self.sums)
        return not last

    def _encode(self, layout: Layout, grads: Sequence[Tensor], room: Tensor) -> None:
        """One row for each part, in their order."""
        wire, noise = self.hops[0], None
        if layout.stochastic:
            noise = self.clock.rows_noise(wire, self.rank, range(self.cut))
        observer = self.clock.observer
        errors = observer.room(wire, layout, room) if observer is not None else None
        kept = self.memories.of(wire, [self.rank])
        if kept is None:
            kernels.encode(layout, grads, noise, room, errors)
        else:
            observed = observer is not None and observer.looks
            grads = memory.encode(layout, grads, noise, room, errors, kept, observed)
        if observer is None:
            return
        observer.encoded(wire, layout, errors)
        if observer.looks:
            pairs = zip(grads, layout.segments, strict=True)
            before = [kernels.padded_rows(g, self.cut, s.numel) for g, s in pairs]
            observer.rows(wire, layout, before, room, self.rank)

    def _encode_again(
        self, hop: int, first: Layout, second: Layout, rows: Tensor, room: Tensor
    ) -> None:
        """Rows uint8 [L, R, n] → the sums' rows, uint8 [R, m]: the parts that this local rank owns
        on each node, or its part of every node's copy. What returns in the node is drawn by the
        local rank, alike on all nodes, and neither remembered nor looked at."""
        node, local = divmod(self.rank, self.cluster.gpus_per_node)
        wire, back, noise = self.hops[hop], hop == 2, None
        parts = range(local, self.cut, self.cluster.gpus_per_node)
        if second.stochastic:
            who, own = (local, [self.cut + local]) if back else (self.rank, list(parts))
            noise = self.clock.rows_noise(wire, who, own)
        kept = None if back else self.memories.of(wire, [self.rank])
        observer = None if back else self.clock.observer
        sums, self.sums = self.sums, None
        if sums is None and kept is None:
            kernels.decode_sum_encode(first, second, self._rows(rows), noise, room)
            if observer is None:
                return
        if sums is None:
            sums = torch.zeros(len(parts), first.coded_numel, device=room.device)
            kernels.decode_sum(first, rows, sums)
        elif kept is None:
            kernels.encode_sums(first, second, sums, noise, room)
        if kept is not None:
            observed = observer is not None
            sums = memory.encode_sums(first, second, sums, noise, room, kept, observed)
            first = memory.between(first, second)
        if observer is not None:
            flat = kernels.finish_sums(first, sums)
            before = [flat[:, s.offset_numel : s.offset_numel + s.numel] for s in first.segments]
            sender = node * self.cluster.gpus_per_node
            observer.rows(wire, second, before, room, sender)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows of K senders in the order in which the recipe adds them."""
        return rows.flip(0) if self.spec.reversed_order else rows

    def _account(self, planned: Sequence[tuple[Wire, Traffic]], sent: Sequence[Traffic]) -> None:
        """Into the ledger, if each wire carried what was planned."""
        if len(self.hops) == 1:  # one hop serves both wires
            sent = [Traffic(sent[0].intra, 0), Traffic(0, sent[0].inter)]
        for (wire, wanted), own in zip(planned, sent, strict=True):
            self.ledger.add(wire, own)
            if own != wanted:
                raise LedgerError(
                    f"unit {self.spec.unit}, {wire}: rank {self.rank} sent {tuple(own)} bytes, "
                    f"planned {tuple(wanted)}"
                )


Way = tuple[Kind, Link, int, int]


def ways(cluster: ClusterConfig, hops: int, cut: int) -> list[Way]:
    """For each hop of a reduction into `cut` parts its kind, its link, and how many rows go to each
    of how many members."""
    nodes, local = cluster.nodes, cluster.gpus_per_node
    first: Way = "exchange", "world", 1, cluster.world
    if hops > 1:
        first = "exchange", "local", cut // local, local
    second: Way = "exchange" if cut == cluster.world else "gather", "across", 1, nodes
    return [first, second, ("gather", "local", 1, local)][:hops]


def uneven(names: Set[str]) -> str:
    """An error's text: these had a gradient in some micro-steps of a step alone."""
    return (
        f"recipe.sharding.grads=node: {min(names)} had a gradient in some micro-steps of a step "
        "and none in others, so its sums would stay in the node; use recipe.sharding.grads=world "
        "or none, or train.accumulate=last"
    )
