"""A unit's gradient reduction for all ranks of a cluster, one rank at a time.

The sums of a real run, in its order: inside a node rank by rank, then node by node. With one
hop the rows of every rank are added to one running sum. With two hops the sum of a node is
re-encoded when the node's last rank has come, and added to the sum over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from zpp_lab import ops
from zpp_lab.codecs import Noise, noise_key
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.traffic import hop_traffic
from zpp_lab.config import Wire
from zpp_lab.engines.watch import Watch
from zpp_lab.layout import Layout
from zpp_lab.plan import UnitPlan


class Reduction:
    """Feed it every rank's gradients with `add`, node after node; `finish` gives the sums."""

    def __init__(
        self,
        plan: UnitPlan,
        seed: int,
        step: int,
        micro: int,
        device: torch.device,
        ledger: Ledger,
        watch: Watch,
    ) -> None:
        self.plan, self.recipe, self.cluster = plan, plan.recipe, plan.recipe.cluster
        self.key = (seed, step, micro)
        self.device, self.ledger, self.watch = device, ledger, watch
        self.names: tuple[str, ...] | None = None  # parameters that have a gradient
        self.added = 0

    def add(self, rank: int, grads: Mapping[str, Tensor]) -> None:
        """One rank's gradients by name; parameters without one are left out, by all ranks."""
        names = tuple(p.name for p in self.plan.unit.parameters if p.name in grads)
        if self.names is None:
            self.names = names
        assert names == self.names, "ranks differ in which parameters have a gradient"
        if not self.layouts:  # a single rank: its gradient is the sum
            self.alone = {n: grads[n].reshape(1, -1).float() for n in names}
            return
        payload = self._encode(rank, [grads[n] for n in names])
        ops.decode_sum(self.layouts[0], payload[None], self.sums[0])
        self.added += 1
        if len(self.layouts) == 2 and self.added % self.cluster.gpus_per_node == 0:
            self._end_node(rank // self.cluster.gpus_per_node)

    def finish(self) -> dict[str, Tensor]:
        """The sums over all ranks: fp32 [W, n] by name, padding rows included."""
        if not self.layouts:
            return self.alone
        assert self.added == self.cluster.world
        if self.names:
            rows = [layout.nbytes for layout in self.layouts]
            for wire, traffic in hop_traffic(self.cluster, self.recipe.hops, rows).items():
                self.ledger.add(wire, traffic)
        last = self.layouts[-1]
        flat = ops.finish_sums(last, self.sums[-1])
        return {s.name: flat[:, s.offset_numel : s.offset_numel + s.numel] for s in last.segments}

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The hops' layouts; every parameter without a gradient drops out."""
        assert self.names is not None
        return tuple(layout.select(set(self.names)) for layout in self.plan.hops)

    @cached_property
    def sums(self) -> list[Tensor]:
        """Running sums of each hop in its rotated domain, fp32 [W, coded_numel]."""
        world = self.cluster.world
        return [torch.zeros(world, lay.coded_numel, device=self.device) for lay in self.layouts]

    def _encode(self, rank: int, grads: Sequence[Tensor]) -> Tensor:
        layout, world = self.layouts[0], self.cluster.world
        noise = self._noise(self.recipe.hops[0], [rank] * world)
        payload = self._empty(layout)
        ops.encode(layout, grads, noise, payload)
        if self.watch.looks:
            rows = [
                ops.padded_rows(g, world, s.numel)
                for g, s in zip(grads, layout.segments, strict=True)
            ]
            self._watch(self.recipe.hops[0], layout, rows, payload, rank)
        return payload

    def _end_node(self, node: int) -> None:
        """Second hop: local rank l of the node sends its sum of shard (m, l) to node m."""
        first, second = self.layouts
        local = self.cluster.gpus_per_node
        senders = [node * local + row % local for row in range(self.cluster.world)]
        payload = self._empty(second)
        ops.encode_sums(
            first, second, self.sums[0], self._noise(self.recipe.hops[1], senders), payload
        )
        if self.watch.looks:
            flat = ops.finish_sums(first, self.sums[0])
            rows = [flat[:, s.offset_numel : s.offset_numel + s.numel] for s in first.segments]
            self._watch(self.recipe.hops[1], second, rows, payload, senders[0])
        ops.decode_sum(second, payload[None], self.sums[1])
        self.sums[0].zero_()

    def _empty(self, layout: Layout) -> Tensor:
        return torch.empty(self.cluster.world, layout.nbytes, dtype=torch.uint8, device=self.device)

    def _noise(self, wire: Wire, ranks: Sequence[int]) -> Noise:
        seed, step, micro = self.key
        rows = tuple(range(self.cluster.world))
        return Noise(noise_key(seed, step, micro, wire), tuple(ranks), rows)

    def _watch(
        self, wire: Wire, layout: Layout, before: list[Tensor], payload: Tensor, rank: int
    ) -> None:
        sums = torch.zeros(payload.shape[0], layout.coded_numel, device=self.device)
        ops.decode_sum(layout, payload[None], sums)
        flat = ops.finish_sums(layout, sums)
        after = [flat[:, s.offset_numel : s.offset_numel + s.numel] for s in layout.segments]
        self.watch.rows(self.key[1], wire, layout, before, after, payload, rank)
