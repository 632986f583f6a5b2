"""A run's plan and memory against its machine's, and the placement that engine.place=auto means.

The choice follows from settings and the sizes of both memories, never from what is free: gradients
go first, then moments, then low planes of masters, then high ones, of as few units as suffice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from zpp_lab.collectives.plan import Plan
from zpp_lab.config.load import written
from zpp_lab.config.residence import LEAVING, Residence, movable
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of, vocabulary
from zpp_lab.runs.provenance import gpu_memory
from zpp_lab.train.memory.buffers import GIB, Estimate
from zpp_lab.train.memory.estimate import estimate

DEFAULT_GIB = 80.0  # of a GPU where none is seen
ROOM = 16  # a GPU's part that engine.place=auto leaves to torch's allocator: 5 of 80 GiB
LAYERS = 1024  # deeper models are not looked for
PINNED = 0.9  # of a host's memory: 116 of 128 GiB could be pinned


@dataclass(frozen=True)
class Outlook:
    """A run's plan and estimate against a device's memory and a rank's part of its host's (None:
    enough), in bytes. Of several phases those of the one that holds most, and each phase's own.
    `auto`: engine.place has been chosen."""

    config: Config
    plan: Plan
    estimate: Estimate
    device: int
    host: int | None = None
    auto: bool = False
    phases: tuple[Outlook, ...] = ()

    @classmethod
    def of(cls, config: Config, device: int, host: int | None = None) -> Outlook:
        """With engine.place=auto choose a placement; where none fits, all that can leave has."""
        if config.engine.place == "auto":
            return _chosen(config, device, host)
        if config.recipe.phases:
            phases = tuple(cls.of(phase.config, device, host) for phase in config.phases)
            most = max(phases, key=lambda phase: phase.estimate.peak)
            return replace(most, config=config, phases=phases)
        plan = plan_of(config)
        return cls(config, plan, estimate(plan, config, vocabulary(config)), device, host)

    @property
    def budget(self) -> int:
        """Bytes that the GPU may hold."""
        return self.device - self.device // ROOM * self.auto

    @property
    def over(self) -> tuple[int, int]:
        """Bytes too many on the GPU and in host memory."""
        held = self.estimate
        host = 0 if self.host is None else max(0, held.host - self.host)
        return max(0, held.peak - self.budget), host

    @property
    def fits(self) -> bool:
        return not any(sum(each.over) for each in self.phases or (self,))

    @property
    def parameters(self) -> int:
        return sum(p.parts * p.numel for u in self.plan.units for p in u.unit.parameters)

    @property
    def placed(self) -> dict[str, int]:
        """How many units have each plane in host memory, by plane."""
        found = Residence.of(self.config).far(len(self.plan.units))
        return {plane: len(found[plane]) for plane in LEAVING if found[plane]}


def _chosen(config: Config, device: int, host: int | None) -> Outlook:
    def at(place: Any) -> Outlook:
        there = replace(config, engine=replace(config.engine, place=place))
        found = Outlook.of(there, device, host)
        phases = tuple(replace(phase, auto=True) for phase in found.phases)
        return replace(found, auto=True, phases=phases)

    best = at("device")
    counts: dict[str, int] = {}
    units = len(best.plan.units)
    for plane in movable(config.train):
        if not best.over[0]:
            break
        best = at(counts | {plane: units})
        low, high = 1, units
        while not best.over[0] and low < high:  # fewer may do
            middle = (low + high) // 2
            less = at(counts | {plane: middle})
            if less.over[0]:
                low = middle + 1
            else:
                best, high = less, middle
        counts[plane] = units
    return best


def deepest(outlook: Outlook) -> Outlook | None:
    """Return the outlook of the built-in decoder of this width with the most layers that fit; None
    where not one does."""
    config = outlook.config
    engine = replace(config.engine, place="auto" if outlook.auto else config.engine.place)

    def at(layers: int) -> Outlook:
        model = replace(config.model, layers=layers)
        there = replace(config, model=model, engine=engine)
        return Outlook.of(there, outlook.device, outlook.host)

    best, low, high = None, 0, 1  # so many fit, and so many do not
    while high <= LAYERS and (found := at(high)).fits:
        best, low, high = found, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        found = at(middle)
        best, low, high = (found, middle, high) if found.fits else (best, low, middle)
    return best


def host_part(config: Config, nbytes: float) -> int:
    """Return a rank's part of what can be pinned on a host of so much memory."""
    here = int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1
    ranks = config.cluster.world if here else config.cluster.gpus_per_node
    return int(PINNED * nbytes) // ranks


def expected(config: Config) -> Outlook:
    """Return the outlook of a run that may begin elsewhere, by engine.gpu_gib and host_gib."""
    engine = config.engine
    device = engine.gpu_gib * GIB if engine.gpu_gib else gpu_memory() or DEFAULT_GIB * GIB
    host = host_part(config, engine.host_gib * GIB) if engine.host_gib else None
    return Outlook.of(config, int(device), host)


def described(outlook: Outlook) -> str:
    """Name a placement, and what it takes of both memories."""
    held, host = outlook.estimate, outlook.host
    of = "" if host is None else f" of {host / GIB:.1f}"
    return (
        f"{written(outlook.config.engine.place)}, of {len(outlook.plan.units)} units; "
        f"{held.peak / GIB:.1f} of {outlook.budget / GIB:.1f} GiB a GPU, {held.host / GIB:.1f}{of} "
        "GiB of host memory a rank"
    )
