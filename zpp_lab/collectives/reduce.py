"""The reduction of a unit's gradients: encode a row for every rank, move, sum in rank order.

One hop: all-to-all over the cluster, then the W rows for this rank's shard are decoded and
added, 0 + row 0 + row 1 + ... Two hops: the same inside the node for the N shards that ranks
of this local rank own, the sums are encoded again, cross between nodes, and are added there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab import ops
from zpp_lab.collectives.clock import Clock
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.traffic import Traffic, hop_traffic
from zpp_lab.collectives.transport import Link, Transport
from zpp_lab.config import Wire
from zpp_lab.layout import Layout

Names = tuple[str, ...]
Sent = dict[Wire, Traffic]


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
        self, spec: ReduceSpec, transport: Transport, ledger: Ledger, clock: Clock
    ) -> None:
        self.spec, self.transport, self.ledger, self.clock = spec, transport, ledger, clock
        self.cluster, self.rank = transport.cluster, transport.rank
        self.hops = spec.hops
        self.layouts: dict[Names, tuple[Layout, ...]] = {}

    def run(self, names: Names, grads: Sequence[Tensor], out: Tensor) -> None:
        """Whole gradients of the named parameters, in layout order → `out` [numel], the sums of
        this rank's padded shards, in out's dtype."""
        layouts = self._layouts(names)
        if self.clock.observer is not None:
            self.clock.observer.gradients(layouts[0], grads)
        payload = self._encode(layouts[0], grads)
        if len(self.hops) == 1:
            rows, sent = self._one_hop(payload)
        else:
            rows, sent = self._two_hops(layouts, payload)
        ops.reduce(layouts[-1], self._in_order(rows), out[None])
        for wire, traffic in sent.items():
            self.ledger.add(wire, traffic)
        self._check(layouts, sent)

    # ------------------------------------------------------------------ parts

    def _layouts(self, names: Names) -> tuple[Layout, ...]:
        """The hops' layouts of the parameters that have a gradient."""
        if names not in self.layouts:
            chosen = frozenset(names)
            self.layouts[names] = tuple(layout.select(chosen) for layout in self.spec.layouts)
        return self.layouts[names]

    def _encode(self, layout: Layout, grads: Sequence[Tensor]) -> Tensor:
        rows = range(self.cluster.world)
        payload = _empty(self.cluster.world, layout, grads[0].device)
        noise = None
        if layout.stochastic:
            noise = self.clock.grads_noise(self.hops[0], self.rank, rows)
        ops.encode(layout, [g.contiguous() for g in grads], noise, payload)
        if self.clock.observer is not None:
            before = [
                ops.padded_rows(g, len(rows), s.numel)
                for g, s in zip(grads, layout.segments, strict=True)
            ]
            self.clock.observer.rows(self.hops[0], layout, before, payload, self.rank)
        return payload

    def _one_hop(self, payload: Tensor) -> tuple[Tensor, Sent]:
        """→ uint8 [W, 1, nbytes]: every rank's row for this rank's shard."""
        arrived = torch.empty_like(payload)
        traffic = self.transport.all_to_all(arrived, payload, "world", self._label(0, "world"))
        sent: Sent = {
            "grads_intra": Traffic(traffic.intra, 0),
            "grads_inter": Traffic(0, traffic.inter),
        }
        return arrived[:, None], sent

    def _two_hops(self, layouts: Sequence[Layout], payload: Tensor) -> tuple[Tensor, Sent]:
        """→ uint8 [N, 1, nbytes]: every node's row for this rank's shard."""
        first, second = layouts
        nodes, local = self.cluster.nodes, self.cluster.gpus_per_node
        rows = payload.view(nodes, local, -1).transpose(0, 1).contiguous()  # [L, N, nbytes]
        arrived = torch.empty_like(rows)
        intra = self.transport.all_to_all(arrived, rows, "local", self._label(0, "local"))
        payload = self._encode_again(first, second, self._in_order(arrived))
        crossed = torch.empty_like(payload)
        inter = self.transport.all_to_all(crossed, payload, "across", self._label(1, "across"))
        return crossed[:, None], {"grads_intra": intra, "grads_inter": inter}

    def _encode_again(self, first: Layout, second: Layout, rows: Tensor) -> Tensor:
        """Rows uint8 [L, N, nbytes] → the sums' payload, uint8 [N, nbytes]: the shards that this
        local rank owns on each node."""
        node, local = divmod(self.rank, self.cluster.gpus_per_node)
        shards = [n * self.cluster.gpus_per_node + local for n in range(self.cluster.nodes)]
        noise = None
        if second.stochastic:
            noise = self.clock.grads_noise(self.hops[1], self.rank, shards)
        payload = _empty(len(shards), second, rows.device)
        ops.decode_sum_encode(first, second, rows, noise, payload)
        if self.clock.observer is not None:
            sums = torch.zeros(len(shards), first.coded_numel, device=rows.device)
            ops.decode_sum(first, rows, sums)
            flat = ops.finish_sums(first, sums)
            before = [flat[:, s.offset_numel : s.offset_numel + s.numel] for s in first.segments]
            sender = node * self.cluster.gpus_per_node
            self.clock.observer.rows(self.hops[1], second, before, payload, sender)
        return payload

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows of K senders in the order in which the recipe adds them."""
        return rows.flip(0) if self.spec.reversed_order else rows

    def _check(self, layouts: Sequence[Layout], sent: Sent) -> None:
        world = self.cluster.world
        planned = hop_traffic(self.cluster, self.hops, [layout.nbytes for layout in layouts])
        for wire, traffic in planned.items():
            if sent[wire] * world != traffic:
                raise LedgerError(
                    f"unit {self.spec.unit}, {wire}: rank {self.rank} sent {tuple(sent[wire])} "
                    f"bytes, planned {(traffic.intra // world, traffic.inter // world)}"
                )

    def _label(self, hop: int, link: Link) -> str:
        return f"{self.hops[hop]} of unit {self.spec.unit} ({link})"


def _empty(rows: int, layout: Layout, device: torch.device) -> Tensor:
    return torch.empty(rows, layout.nbytes, dtype=torch.uint8, device=device)
