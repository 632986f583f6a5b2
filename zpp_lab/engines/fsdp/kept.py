"""The weights that each node keeps (`collectives/exchange.py`), of all units of one rank.

They follow from the masters by an encode, with one exception: where differences travel they hold
what rounding has lost so far, and are part of a checkpoint. All nodes hold equal bits, so each rank
saves its own row of every parameter, as it saves its shard of the master, and gets the others' rows
from the ranks of its place on other nodes. Nodes that have come apart would stay so, since a
difference moves both of them alike: before they are saved, their marks are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from zpp_lab.collectives.context import Observer
from zpp_lab.collectives.exchange import Exchange
from zpp_lab.collectives.plan import Bytes, add_bytes
from zpp_lab.collectives.transport import HostStreams, Overlap, Streams, all_gather
from zpp_lab.config.wires import UPDATE
from zpp_lab.engines.frozen import mark
from zpp_lab.engines.fsdp.comm import Installed
from zpp_lab.engines.fsdp.resident import master
from zpp_lab.engines.optim.shards import local


class Kept:
    """Of the units that nodes keep; of other recipes nothing, and every call does nothing.

    parameters: the model's by name, DTensors. Every rank makes every call alike.
    """

    def __init__(
        self,
        units: Sequence[Installed],
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None = None,
        low: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`group`: of all ranks of the cluster, where the world has more. `low`: the low planes of
        parameters that are high ones."""
        self.units, self.parameters, self.group = units, parameters, group
        planes = low or {}
        self.low: Callable[[str, nn.Parameter], Tensor | None] = lambda name, p: planes.get(name)
        # in the order of the next forward, which begins with the root, the last unit
        in_turn = (*units[-1:], *units[:-1])
        self.updates: list[Exchange] = [u.update for u in in_turn if u.update is not None]
        self.stale = bool(self.updates)  # whether the weights have still to be kept
        self.ok: Tensor | None = None  # whether the last norm was finite, as long as it is read
        streams: Streams = self.updates[0].streams if self.updates else HostStreams()
        self.under_way = Overlap(streams, f"{UPDATE} between nodes")

    def start(self, done: int) -> None:
        """Keep the weights after `done` steps, before the first step and after a state without
        them was loaded."""
        if self.stale:
            self._start(done)

    def _start(self, done: int, there: Collection[str] = ()) -> None:
        self.stale = False
        self.wait()
        for update in self.updates:
            masters = self._masters(p.name for p in update.plan.unit.parameters)
            update.start(masters, done, there)

    def send(
        self,
        done: int,
        ok: Tensor,
        sent: Bytes,
        observer: Observer | None = None,
        update: Callable[[Iterable[str]], object] = lambda names: None,
    ) -> None:
        """A step has updated the masters, if `ok` is true on the device: send the weights after
        `done` steps, and add the bytes of all ranks to `sent`. `update`: updates the masters of
        these names, unit by unit. Weights travel on a stream of their own, beside what comes next,
        unless an observer looks."""
        self.ok, streams = ok, self.under_way.streams  # ok: is read until all is encoded
        self.under_way.forget()  # of a step that has failed
        for exchange in self.updates:
            update(p.name for p in exchange.plan.unit.parameters)
            names = [s.name for s in exchange.layout.segments]
            if observer is None:
                updated = streams.mark()
                with streams.lane(UPDATE):
                    streams.wait(updated)
                    masters = self._masters(names)
                    self.under_way.ship(*exchange.begin(masters, done, ok))
            else:
                for part in exchange.begin(self._masters(names), done, ok, observer):
                    part()
            add_bytes(sent, {UPDATE: exchange.ledger.step[UPDATE]}, exchange.cluster.world)
        with streams.lane(UPDATE):
            self.under_way.join()

    def wait(self) -> None:
        """The current stream goes on once all weights are where they belong: before masters
        change, and before what is kept is read or written by others than gathers."""
        for update in self.updates:
            update.wait()

    def _masters(self, names: Iterable[str]) -> list[Tensor]:
        return [master(p, self.low(n, p)) for n, p in ((n, self.parameters[n]) for n in names)]

    def state(self) -> dict[str, DTensor]:
        """What is remembered, sharded as the masters are; it shares memory with what is kept.
        RuntimeError on all ranks where nodes hold other bits."""
        if any(update.plan.remembered for update in self.updates):
            self.start(0)  # before a first step: the weights as they are
            self._compare()
        return self.remembered()

    def remembered(self) -> dict[str, DTensor]:
        """The same, as it is at the moment."""
        self.wait()
        found: dict[str, DTensor] = {}
        for update in self.updates:
            for name in update.plan.remembered:
                p = self.parameters[name]
                assert isinstance(p, DTensor)
                shard = local(p)
                own = update.kept[name].own.view(-1)[: shard.numel()].view(shard.shape)
                mesh, placed = p.device_mesh, p.placements
                found[name] = DTensor.from_local(
                    own, mesh, placed, run_check=False, shape=p.shape, stride=p.stride()
                )
        return found

    def _compare(self) -> None:
        self.wait()
        names = [name for update in self.updates for name in update.plan.remembered]
        rows = [u.kept[name].rows for u in self.updates for name in u.plan.remembered]
        own = torch.stack([mark(r.float(), 0, tuple(r.shape))[0] for r in rows]).to(rows[0].device)
        cluster = self.updates[0].cluster
        shape = cluster.nodes, cluster.gpus_per_node, len(names)
        every = torch.empty(shape, dtype=own.dtype, device=own.device)
        all_gather(every.view(-1), own, group=self.group)
        apart = (every != every[0]).any(1).cpu()
        for node, differs in enumerate(apart):
            if bool(differs.any()):
                name = names[int(differs.int().argmax())]
                raise RuntimeError(
                    f"node {node} holds other replicated weights of {name} than node 0: a GPU or "
                    "a link has changed some bits; resume from an earlier checkpoint"
                )

    def loaded(self, there: Collection[str]) -> None:
        """Another state was loaded, and with it of what `state` gives those that are `there`."""
        own = {name for u in self.updates for name in u.plan.remembered if name in there}
        self.stale = bool(self.updates) and not own
        if own:
            self._start(0, own)


def on_ranks(
    rows: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What this rank's encoders remember, [1, rows, width] by UPDATE.PARAMETER → of all ranks,
    DTensors [W, rows, width]."""
    if not rows:
        return {}
    device = next(p.device_mesh.device_type for p in parameters.values() if isinstance(p, DTensor))
    if group is None:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(group, device)
    make = DTensor.from_local
    return {name: make(own, mesh, [Shard(0)], run_check=False) for name, own in rows.items()}
