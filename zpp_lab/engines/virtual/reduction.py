"""The gradient reduction for all ranks of a cluster, one rank at a time.

The sums of a real run, in its order: inside a node rank by rank, then node by node. With one
hop the rows of every rank are added to one running sum. With two hops the sum of a node is
re-encoded when the node's last rank has come, and added to the sum over nodes. Where sums of
several micro-steps stay in the node, its ranks come once for each of them before the next node's.

Buffers are made once and serve every reduction. Small units are reduced together: a segment's
bytes do not depend on its neighbours, so this changes no bit and saves launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zpp_lab.codecs import Noise, kernels, noise_key
from zpp_lab.codecs.kernels import memory
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Memories
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import Unit, UnitPlan
from zpp_lab.collectives.reduce import uneven
from zpp_lab.config.wires import Wire
from zpp_lab.engines.watch import Watch

TOGETHER = 2**24  # elements of units that are reduced together at most


class Reduction:
    """`start`, then every rank's gradients with `add`, node after node; `mean` ends it."""

    def __init__(
        self, plan: UnitPlan, device: torch.device, ledger: Ledger, memories: Memories | None = None
    ) -> None:
        """Prepare for a plan's unit. `memories`: residuals of all ranks; None: without."""
        self.memories = memories or Memories({}, ())
        self.plan, self.recipe, self.cluster = plan, plan.recipe, plan.recipe.cluster
        self.device, self.ledger = device, ledger
        self.cut = self.recipe.cut
        self.names: tuple[str, ...] | None = None  # parameters that have a gradient
        self.layouts: tuple[Layout, ...] = ()  # one a hop
        # of each hop, a row for each part that sums are cut into, W or L
        self.sums: list[Tensor] = []  # in its rotated domain: fp32 [W, coded_numel]
        self.payloads: list[Tensor] = []  # uint8 [W, nbytes]
        self.alone: dict[str, Tensor] = {}  # a single rank's gradients
        self.start((0, 0), 1, Watch())

    def start(self, key: tuple[int, int], times: int, watch: Watch) -> None:
        """Begin a reduction at this seed and step, to which each rank comes `times` times."""
        self.key, self.times, self.watch, self.added = key, times, watch, 0

    def add(self, rank: int, micro: int, grads: Mapping[str, Tensor]) -> None:
        """Add one rank's gradients by name; parameters without one are left out, by all ranks."""
        self.micro = micro
        names = tuple(p.name for p in self.plan.unit.parameters if p.name in grads)
        if not self.added:
            self._prepare(names)
        if self.times > 1 and names != self.names:
            raise ValueError(uneven(set(names) ^ set(self.names or ())))
        assert names == self.names, "ranks differ in which parameters have a gradient"
        self.added += 1
        if not self.layouts:  # a single rank: its gradient is the sum
            self.alone = {n: grads[n].reshape(1, -1) for n in names}
            return
        self._encode(rank, [grads[n] for n in names])
        kernels.decode_sum(self.layouts[0], self.payloads[0][None], self.sums[0])
        node = self.cluster.gpus_per_node * self.times
        if len(self.layouts) > 1 and self.added % node == 0:
            self._end_node(rank // self.cluster.gpus_per_node)

    def mean(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the sums over all ranks, rounded to `dtype` and divided there: fp32 [W, n] by
        name, padding rows included. Tensors of the caller's own."""
        assert self.added == self.cluster.world * self.times
        if not self.layouts:
            return {n: (g.float().to(dtype) / 1).float() for n, g in self.alone.items()}
        for hop, leg in enumerate(self.legs):
            self.ledger.add(leg.wire, leg.traffic if hop else leg.traffic * self.times)
        if len(self.layouts) == 3:
            return self._returned(dtype)
        last = self.layouts[-1]
        flat = kernels.finish_sums(last, self.sums[-1]).to(dtype)
        return _columns(last, (flat / self.cluster.world).float())

    def _returned(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Do the third hop: local rank l sends part l of the sums to its neighbours."""
        _, second, third = self.layouts
        wire, rows = self.recipe.hops[2], range(self.cut)
        key = noise_key(*self.key, self.micro, wire)
        noise = Noise(key, tuple(rows), tuple(self.cut + row for row in rows))
        kernels.encode_sums(second, third, self.sums[1], noise, self.payloads[2])
        known = {p.name: p.numel for p in self.plan.unit.parameters}
        sizes = [known[s.name] for s in third.segments]
        outs = [torch.empty(1, n, dtype=dtype, device=self.device) for n in sizes]
        kernels.decode(third, self.payloads[2], outs)
        pairs = zip(third.segments, outs, strict=True)
        return {s.name: (out / self.cluster.world).float() for s, out in pairs}

    def _prepare(self, names: tuple[str, ...]) -> None:
        """Zero the sums for these parameters; parameters without a gradient drop out."""
        if names == self.names:
            for sums in self.sums:
                sums.zero_()
            return
        chosen = set(names)
        self.names = names
        self.legs = self.plan.reduce_legs(chosen)
        self.layouts = tuple(lay.select(chosen) for lay in self.plan.hops)
        numels = [layout.coded_numel for layout in self.layouts]
        self.sums = [torch.zeros(self.cut, n, device=self.device) for n in numels]
        self.payloads = [
            torch.empty(self.cut, lay.nbytes, dtype=torch.uint8, device=self.device)
            for lay in self.layouts
        ]

    def _encode(self, rank: int, grads: Sequence[Tensor]) -> None:
        layout, payload, own = self.layouts[0], self.payloads[0], [rank] * self.cut
        wire = self.recipe.hops[0]
        errors, noise = self.watch.room(layout, payload), self._noise(wire, own)
        kept = self.memories.of(wire, [rank])
        if kept is None:
            kernels.encode(layout, grads, noise, payload, errors)
        else:
            memory.encode(layout, grads, noise, payload, errors, kept, observed=False)
        self.watch.encoded(wire, self.micro, own, layout, errors)
        self._check(wire, layout, payload, rank)

    def _end_node(self, node: int) -> None:
        """Do the second hop: local rank l of the node sends its sum of shard (m, l) to node m, or
        that of shard l to all of them."""
        first, second = self.layouts[:2]
        local, payload = self.cluster.gpus_per_node, self.payloads[1]
        senders = [node * local + row % local for row in range(self.cut)]
        wire, sums = self.recipe.hops[1], self.sums[0]
        kept = self.memories.of(wire, senders[:local])
        if kept is None:
            kernels.encode_sums(first, second, sums, self._noise(wire, senders), payload)
        else:
            noise = self._noise(wire, senders)
            sums = memory.encode_sums(first, second, sums, noise, payload, kept, self.watch.looks)
            first = memory.between(first, second)
        if self.watch.looks:
            rows = list(_columns(first, kernels.finish_sums(first, sums)).values())
            self.watch.encoded_again(wire, self.micro, senders, second, rows, payload)
            self._check(wire, second, payload, senders[0])
        kernels.decode_sum(second, payload[None], self.sums[1])
        self.sums[0].zero_()

    def _noise(self, wire: Wire, ranks: Sequence[int]) -> Noise:
        return Noise(noise_key(*self.key, self.micro, wire), tuple(ranks), tuple(range(self.cut)))

    def _check(self, wire: Wire, layout: Layout, payload: Tensor, rank: int) -> None:
        """Check every value that the payload brings."""
        if not self.watch.check:
            return
        sums = torch.zeros(payload.shape[0], layout.coded_numel, device=self.device)
        kernels.decode_sum(layout, payload[None], sums)
        after = list(_columns(layout, kernels.finish_sums(layout, sums)).values())
        self.watch.rows(self.key[1], wire, layout, after, rank)


def _columns(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """Cut [W, numel] into [W, n] of each segment by name, as views."""
    return {s.name: flat[:, s.offset_numel : s.offset_numel + s.numel] for s in layout.segments}


def together(units: Iterable[UnitPlan], limit: int = TOGETHER) -> list[UnitPlan]:
    """Join neighbouring units as long as they have at most `limit` elements."""
    joined: list[UnitPlan] = []
    for unit in units:
        if joined and _numel(joined[-1]) + _numel(unit) <= limit:
            a, b = joined[-1].unit, unit.unit
            parameters, trainable = a.parameters + b.parameters, a.trainable | b.trainable
            both = Unit(f"{a.name}+{b.name}", parameters, trainable, stored=a.stored | b.stored)
            joined[-1] = replace(joined[-1], unit=both)
        else:
            joined.append(unit)
    return joined


def _numel(plan: UnitPlan) -> int:
    return sum(p.numel for p in plan.unit.parameters)
