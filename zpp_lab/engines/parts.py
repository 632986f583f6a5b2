"""One rank's tensor part: what it exchanges with the others of its reader, outside of FSDP2.

FSDP2 shards a part over the ranks of its cell. Parts are cut before that, as plain parameters, so
no collective of torch's runs between them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zpp_lab.collectives.acts import Parts
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import Bytes, Leg, Plan, add_bytes, leg_bytes
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.cluster import CELL, ClusterConfig
from zpp_lab.engines.fsdp.mesh import Ranks
from zpp_lab.models.cut import PartLlama


def cell_of(cluster: ClusterConfig, device: torch.device) -> Ranks | None:
    """Return the ranks of this one's cell, with the mesh that FSDP2 shards over; None where they
    are all."""
    if cluster.tp == 1:
        return None
    shape = cluster.dp.nodes, cluster.dp.gpus_per_node, cluster.tp
    names = ("nodes", "gpus", "tp")
    found = Ranks.pick(init_device_mesh(device.type, shape, mesh_dim_names=names), None)
    assert list(found.ranks) == cluster.members(CELL, dist.get_rank())
    return found


class OwnPart:
    """This rank's part, number `part` of its reader; `joined` makes one."""

    def __init__(
        self, model: PartLlama, plan: Plan, cluster: ClusterConfig, clock: Clock, watchdog: Watchdog
    ) -> None:
        assert plan.parts is not None
        ranks = cluster.members({"tp"}, dist.get_rank())
        among = ProcessGroups(ClusterConfig(1, cluster.tp), watchdog, ranks)
        self.parts = Parts(plan.parts, clock, Ledger(), among)
        self.parts.rank, self.part = dist.get_rank() // cluster.tp, among.rank
        self.world = cluster.world
        every = [p for unit in plan.units for p in unit.unit.parameters]
        self.shared = {p.name: p.shard_numel for p in every if p.parts == 1}
        model.join((model,), self.parts)

    @classmethod
    def joined(
        cls, model: nn.Module, plan: Plan, cluster: ClusterConfig, clock: Clock, watchdog: Watchdog
    ) -> OwnPart | None:
        """Join the model's part with the others; None for a whole model."""
        if not isinstance(model, PartLlama):
            return None
        return cls(model, plan, cluster, clock, watchdog)

    def add_shared(self, grads: dict[str, Tensor]) -> None:
        """Sum the shards of gradients of parameters that all parts have, in one exchange."""
        names = sorted(self.shared)
        sizes = [self.shared[name] for name in names]
        rows = torch.zeros(sum(sizes), device=next(iter(grads.values())).device)
        for name, row in zip(names, rows.split(sizes), strict=True):
            if name in grads:
                row[: grads[name].numel()] = grads[name].flatten()
        (total,) = self.parts.sum("shared gradients", [rows])
        for name, row in zip(names, total.split(sizes), strict=True):
            if name in grads:
                grads[name].copy_(row[: grads[name].numel()].view_as(grads[name]))

    def counted(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients whose squares this rank adds to the norm."""
        return {n: g for n, g in grads.items() if self.part == 0 or n not in self.shared}

    def every(self, cell: Bytes) -> Bytes:
        """Return what all ranks have sent, where those of a cell sent `cell`. LedgerError where
        parts exchanged something else than planned."""
        ledger = self.parts.ledger
        ledger.step = {wire: sent * self.world for wire, sent in ledger.step.items()}
        planned = leg_bytes(Leg(*leg) for leg in self.parts.plan.legs())
        ledger.check(planned)
        add_bytes(planned, cell, self.parts.plan.tp)
        return planned
