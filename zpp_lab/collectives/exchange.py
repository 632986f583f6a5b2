"""Exchanges of new weights between ranks of equal place, which keep what they get.

On `weights_update` a rank keeps, in param_dtype, the N shards that the ranks of its own place on
every node own: rows [N, n] of each parameter, from which gathers inside the node are encoded. After
the optimizer's update each rank encodes its own new shard, the ranks of equal place exchange these
rows, and every one of them, the sender too, keeps what the payload decodes to. So all nodes hold
equal bits.

`differences`: what travels is x − m, of the master x and the row m that is kept; both sides then
keep m + d, d being what the payload decodes to. What rounding lost is part of the next difference.
So 4 bits of a difference are as fine as a step is small (Jia et al. 2024, "SDP4Bit",
arXiv:2410.15526). Parameters without a codec travel whole.

Exchanges can run on a stream of their own: the next forward's first gather waits for its own unit's
rows alone, so later units travel while earlier ones compute.

Each operation is rounded alone, in fp32; what is kept is rounded once more, to param_dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs import Noise, kernels
from zpp_lab.codecs.layout import Layout, Parameter
from zpp_lab.collectives.context import Clock, Observer
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.plan import UnitPlan
from zpp_lab.collectives.traffic import NOTHING, Traffic
from zpp_lab.collectives.transport import HostStreams, Link, Streams, Transport, members
from zpp_lab.config.wires import Wire


@dataclass(frozen=True)
class Row:
    """One parameter as a rank keeps it: rows [N, n] in param_dtype, its own among them."""

    rows: Tensor
    own: Tensor  # [1, n]
    padding: tuple[Tensor, ...]  # past the parameter's end, where zeros stay

    @classmethod
    def make(
        cls, p: Parameter, owners: Sequence[int], own: int, dtype: torch.dtype, device: torch.device
    ) -> Row:
        """owners: whose shard each row is; own: which of them is ours."""
        numel, n = p.numel, p.shard_numel
        rows = torch.zeros(len(owners), n, dtype=p.dtype or dtype, device=device)
        ends = [min(n, max(0, numel - rank * n)) for rank in owners]
        padding = tuple(row[end:] for row, end in zip(rows, ends, strict=True) if end < n)
        return cls(rows, rows[own : own + 1], padding)


class Exchange:
    """What one rank keeps of one unit, and its exchanges on `wire` with the members of `link`."""

    def __init__(
        self,
        wire: Wire,
        link: Link,
        plan: UnitPlan,
        transport: Transport,
        ledger: Ledger,
        clock: Clock,
        device: torch.device,
        streams: Streams | None = None,
    ) -> None:
        """streams: of the device, shared by all units."""
        self.wire, self.link, self.raw = wire, link, plan.raw
        self.transport, self.ledger, self.clock = transport, ledger, clock
        self.streams: Streams = streams or HostStreams()
        self.filled = False  # whether `start` has put weights in the rows
        self.arrived: Any = None  # a mark behind the last exchange, on whichever stream it ran
        self.follow(plan)
        self.cluster, self.rank = transport.cluster, transport.rank
        self.owners = members(self.cluster, link, self.rank)
        own, dtype = self.owners.index(self.rank), plan.recipe.weights_dtype
        self.kept = {
            p.name: Row.make(p, self.owners, own, dtype, device) for p in plan.unit.parameters
        }
        self.label = f"{wire} of unit {plan.unit.name} ({link})"
        self.transport.reserve("gather", link, self.raw.nbytes)

    def follow(self, plan: UnitPlan) -> None:
        """Send as `plan` says: the first one's, or another phase's of the same unit."""
        self.plan, self.differences = plan, plan.recipe.differences
        _, self.layout, self.planned, _ = plan.leg(self.wire)
        self.transport.reserve("gather", self.link, self.layout.nbytes)

    def rows(self) -> list[Tensor]:
        """Rows [N, n] of every parameter of the unit, in its order. The current stream waits for
        the last exchange. ValueError before `start`: the rows are still zeros."""
        if not self.filled:
            raise ValueError(
                f"recipe {self.plan.recipe.config.name}, unit {self.plan.unit.name}: its "
                "node-replicated weights were gathered before the nodes got them: call the model "
                "that was sharded, or use recipe.sharding.weights=world"
            )
        self.wait()
        return [kept.rows for kept in self.kept.values()]

    def wait(self) -> None:
        """The current stream goes on once the last exchange has ended."""
        if self.arrived is not None:
            self.streams.wait(self.arrived)

    @torch.no_grad()
    def start(self, masters: Sequence[Tensor], done: int, there: Collection[str] = ()) -> None:
        """Keep the weights after `done` steps. Not of a step, so the ledger does not count it.

        masters: this rank's shards of every parameter, in the unit's order. there: whose own
        rows are there already.
        """
        for (name, kept), master in zip(self.kept.items(), masters, strict=True):
            if name not in there:
                kept.own.copy_(_row(master, kept.own))
        self._spread()
        if not self.differences:
            named = dict(zip(self.kept, masters, strict=True))
            ship, finish = self._exchange([named[s.name] for s in self.layout.segments], done)
            ship()
            finish()
        self.filled = True

    def _spread(self) -> None:
        """Give this rank's own rows to the other members uncompressed."""
        kept = list(self.kept.values())
        payload = self._empty(self.raw)
        leg = self.transport.gathering(payload, self.link, self.label)
        kernels.encode(self.raw, [k.own for k in kept], None, leg.room)
        leg.send()
        kernels.decode(self.raw, payload, [k.rows for k in kept])

    @torch.no_grad()
    def begin(
        self, masters: Sequence[Tensor], done: int, ok: Tensor, observer: Observer | None = None
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """A step has updated the masters (this rank's shards of the layout's parameters): encode
        the new weights. The rest in two: send them; keep what has arrived, unless `ok` is false on
        the device."""
        ship, keep = self._exchange(masters, done, ok, observer)

        def send() -> None:
            sent = ship()
            self.ledger.add(self.wire, sent)
            if sent * self.cluster.world != self.planned:
                raise LedgerError(
                    f"unit {self.plan.unit.name}, {self.wire}: rank {self.rank} sent "
                    f"{tuple(sent)} bytes, planned {tuple(self.planned)} of all ranks"
                )

        def finish() -> None:
            keep()
            self.arrived = self.streams.mark(self.arrived, outside=True)

        return send, finish

    def _exchange(
        self,
        masters: Sequence[Tensor],
        done: int,
        ok: Tensor | None = None,
        observer: Observer | None = None,
    ) -> tuple[Callable[[], Traffic], Callable[[], None]]:
        layout, kept = self.layout, [self.kept[s.name] for s in self.layout.segments]
        if not kept:
            return lambda: NOTHING, lambda: None
        own, differences = [k.own for k in kept], self.differences
        # no copy of fp32 masters where the weights are
        masters = [x.to(own[0].device, torch.float32) for x in masters]
        payload = self._empty(layout)
        leg = self.transport.gathering(payload, self.link, self.label)
        noise = None
        if layout.stochastic:
            noise = Noise.of_owners(self.clock.seed, done, self.wire, [self.rank])
        errors = observer.room(self.wire, layout, leg.room) if observer is not None else None
        kernels.encode_update(layout, masters, own, differences, noise, leg.room, errors)
        if observer is not None:
            observer.encoded(self.wire, layout, errors)

        def keep() -> None:
            kernels.decode(layout, payload, [k.rows for k in kept], differences, ok)
            for padding in (p for k in kept for p in k.padding):
                padding.zero_()

        return leg.send, keep

    def _empty(self, layout: Layout) -> Tensor:
        device = next(iter(self.kept.values())).rows.device
        shape = (len(self.owners), layout.nbytes)
        return torch.empty(shape, dtype=torch.uint8, device=device)


def _row(shard: Tensor, like: Tensor) -> Tensor:
    """A shard's elements as a row [1, n], filled up with zeros, where `like` is."""
    return kernels.padded_rows(shard.detach().to(like.device), 1, like.shape[1])
