"""What updates, gathers of weights that lie in host memory, and gradients on their way there move
over the bus and in GPU memory.

Parameters are updated in stages, in two streams: one stage comes in while another goes out
(`engines/optim/host.py`). Both ways are taken to have half of what the bus carries in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.plan import Plan, UnitPlan
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, Wire
from zpp_lab.engines.optim.host import stages
from zpp_lab.engines.units import far_names
from zpp_lab.tools.plan.cost.machine import Bus, Machine
from zpp_lab.train.memory.shards import HALF, passing_bytes, passing_rows, shard_bytes

# Bytes that the GPU's memory moves for an element of a rank's shards.
MOMENTS = {"fp32": 16, "bf16": 8, "8bit": 4}  # both, read and written
MASTER = {"fp32": 12, "split": 10}  # read and written, and its gradient read
GRADIENT = {"fp32": 4, "split": HALF}  # read once by ours (engines/norm.py) and by torch's
CLIP = 8  # a gradient multiplied before torch's update; ours does it by itself


@dataclass(frozen=True)
class Stage:
    """Parameters that are updated together: seconds in, of the update, and out."""

    comes: float
    update: float
    goes: float


class State:
    """A plan's training state on a machine. ValueError where some of it passes a bus that has no
    figures."""

    def __init__(self, plan: Plan, config: Config, machine: Machine) -> None:
        self.plan, self.config, self.memory = plan, config, machine.memory_bytes_per_s
        self.residence = Residence.of(config)
        self.far = far_names(plan, self.residence)
        self.masters, self.kind = config.train.masters, config.train.optimizer_state
        self.bus: Bus | None = machine.bus if self.residence.passes else None
        if self.residence.passes and machine.bus is None:
            raise NoFigures(
                f"machine {machine.name} has no figures of the bus to host memory (bus), which "
                "engine.place and train.optimizer_place=host need: `zpp-lab bench calibrate` "
                "measures it"
            )

    @property
    def way(self) -> float:
        """Bytes a second of each way while both are in use."""
        return self.bus.both / 2 if self.bus else 1.0

    def stages(self, units: Sequence[UnitPlan]) -> Iterator[Stage]:
        """Yield the stages in which units are updated."""
        each = MOMENTS[self.kind] + MASTER[self.masters]
        torchs = self.masters == "fp32" and self.kind == "fp32"
        each += CLIP if self.config.train.clip and torchs else 0
        passing = {p: passing_bytes(p, self.config, self.far) for u in units for p in trained(u)}
        rows = {p: passing_rows(p, self.far) for p in passing}
        for some in stages(passing, lambda p: passing[p][0], rows.__getitem__):
            share = [(c.item, len(c.rows) / rows[c.item] if c.rows else 1) for c in some]
            comes, goes = (sum(s * passing[p][way] for p, s in share) / self.way for way in (0, 1))
            update = each * sum(s * p.shard_numel for p, s in share) / self.memory
            yield Stage(comes, update, goes)

    def norm(self, units: Iterable[UnitPlan]) -> float:
        """Return the seconds of the norm's pieces of units, of gradients in GPU memory."""
        near = (p for u in units for p in trained(u) if not self._gone(p))
        return shard_bytes(near, GRADIENT[self.masters]) / self.memory

    def leaving(self, unit: UnitPlan) -> int:
        """Return the bytes of a unit's gradients that go to host memory."""
        gone = (p for p in trained(unit) if self._gone(p))
        return shard_bytes(gone, GRADIENT[self.masters])

    def coming(self, unit: UnitPlan, wire: Wire, updated: bool) -> int:
        """Return the bytes of a unit's weights that come from host memory for a gather. `updated`:
        those that are trained came for their update."""
        if self.plan.recipe.kept or (wire == BACKWARD and unit.keeps_secondary):
            return 0  # the gather reads what nodes have
        skip = unit.unit.stored | (unit.unit.trainable if updated else frozenset())
        every = (p for p in unit.unit.parameters if p.name not in skip)
        return shard_bytes((p for p in every if p.name in self.far["weights"]), HALF)

    def _gone(self, p: Parameter) -> bool:
        return p.name in self.far["gradients"]


class NoFigures(ValueError):
    """The step has no predicted time: no figures of a bus, or no formula for interleaved stages."""


def trained(unit: UnitPlan) -> list[Parameter]:
    return [p for p in unit.unit.parameters if p.name in unit.unit.trainable]
