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
from zpp_lab.config.residence import LEAVING, Residence, fewest, movable
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of, vocabulary
from zpp_lab.engines.optim.host import STREAMS
from zpp_lab.engines.units import far_names
from zpp_lab.runs.provenance import gpu_memory
from zpp_lab.train.memory.activations import FP32
from zpp_lab.train.memory.buffers import GIB, Estimate
from zpp_lab.train.memory.estimate import estimate
from zpp_lab.train.memory.shards import (
    HALF,
    optimizer_bytes,
    passing_bytes,
    shard_bytes,
    stage_bytes,
)

DEFAULT_GIB = 80.0  # of a GPU where none is seen
ROOM = 32  # a GPU's part that engine.place=auto leaves to torch's allocator: 2.5 of 80 GiB
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

    units = len(at("device").plan.units)
    return fewest(movable(config.train), units, at, lambda found: found.over[0])


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


def host_part(config: Config, nbytes: float, planned: bool = False) -> int:
    """Return a rank's part of what can be pinned on a host of so much memory: of a run that begins
    here, or (`planned`) of one whose nodes are hosts."""
    here = not planned and int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1
    ranks = config.cluster.world if here else config.cluster.gpus_per_node
    return int(PINNED * nbytes) // ranks


def expected(config: Config) -> Outlook:
    """Return the outlook of a run that may begin elsewhere, by engine.gpu_gib and host_gib."""
    engine = config.engine
    device = engine.gpu_gib * GIB if engine.gpu_gib else gpu_memory() or DEFAULT_GIB * GIB
    host = host_part(config, engine.host_gib * GIB, planned=True) if engine.host_gib else None
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


def state_held(config: Config, plan: Plan) -> tuple[int, int]:
    """Return the bytes of rank 0's masters, moments and gradients on the GPU, with what passes it,
    and in host memory."""
    far, train = far_names(plan, Residence.of(config)), config.train
    every = [p for u in plan.units for p in u.unit.parameters]
    names = {name for u in plan.units for name in u.unit.trainable}
    trained = [p for p in every if p.name in names]
    kept = HALF if train.masters == "split" else FP32
    stored = shard_bytes(trained, kept) if train.clip_by == "norm" else 0
    whole = shard_bytes(every) + optimizer_bytes(trained, train.optimizer_state) + stored
    gone = sum(passing_bytes(p, config, far)[0] for p in trained)
    low = shard_bytes((p for p in every if p.name in far["masters"] - names), HALF)
    host = gone + low
    passing = min(gone, STREAMS * stage_bytes(trained, config, far))
    return whole - host + passing, host


def placed_state(config: Config, plan: Plan) -> Config:
    """Return a user training loop's settings with what place=auto means to its training state by
    engine.gpu_gib and engine.host_gib; what activations take is not known. ValueError says by how
    much the state does not fit, and what would."""
    engine = config.engine
    if engine.place != "auto":
        if engine.gpu_gib or engine.host_gib:
            raise ValueError("gpu_gib and host_gib are read by place='auto' alone: leave them out")
        return config
    if not engine.gpu_gib:
        raise ValueError(
            "place='auto' cannot see what activations take: set gpu_gib to what training state may "
            "take of a GPU, or place to a placement"
        )
    gpu = int(engine.gpu_gib * GIB)
    host = host_part(config, engine.host_gib * GIB) if engine.host_gib else None

    def over(one: Config) -> tuple[int, int]:
        held = state_held(one, plan)
        return max(0, held[0] - gpu), 0 if host is None else max(0, held[1] - host)

    def best(one: Config) -> Config:
        def at(place: Any) -> Config:
            return replace(one, engine=replace(engine, place=place))

        planes = [plane for plane in movable(one.train) if plane != "weights"]
        return fewest(planes, len(plan.units), at, lambda found: over(found)[0])

    chosen = best(config)
    if not any(over(chosen)):
        return chosen
    ways, changes = "more ranks, or larger budgets", dict[str, Any]()
    for name, value in (("masters", "split"), ("optimizer_state", "8bit"), ("clip_by", "unit")):
        more = changes | {name: value}
        both = more | {"param_dtype": "bf16"} if "masters" in more else more
        try:
            other = replace(config, train=replace(config.train, **both))
        except ValueError:
            continue  # it does not go with the rest
        changes = more
        if not any(over(best(other))):
            ways = ", ".join(f"{key}={new!r}" for key, new in both.items())
            break
    room = "" if host is None else f" of {host / GIB:.2f} GiB a rank"
    raise ValueError(
        f"{described_state(chosen, plan)}: more than gpu_gib={engine.gpu_gib:g} GiB, or than the "
        f"host has{room}: use {ways}"
    )


def described_state(config: Config, plan: Plan) -> str:
    """Name a user training loop's placement, and what its state takes of both memories."""
    gpu, host = state_held(config, plan)
    return (
        f"place={written(config.engine.place)}: masters, moments and gradients take "
        f"{gpu / GIB:.2f} GiB of a GPU and {host / GIB:.2f} GiB of host memory a rank"
    )
