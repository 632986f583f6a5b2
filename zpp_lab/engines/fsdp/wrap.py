"""Wraps a model's units in FSDP2 as a plan says, with our collectives or with FSDP2's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from zpp_lab.collectives.context import Clock, Memories
from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.transport import CudaStreams, HostStreams, Transport
from zpp_lab.engines.fsdp.base import set_aside
from zpp_lab.engines.fsdp.comm import Installed, UnderWay, install, install_later, land
from zpp_lab.engines.fsdp.gradients import LandedReduce
from zpp_lab.engines.fsdp.mesh import Ranks
from zpp_lab.engines.fsdp.packed import Fallbacks
from zpp_lab.engines.units import ROOT, Blocks, is_untouched, with_root


@dataclass
class Wrapped:
    """A model under FSDP2. `installed` is empty when FSDP2 is left untouched, and `reduces` on one
    rank."""

    model: nn.Module
    by_name: dict[str, FSDPModule]  # each unit's first, then the root
    clock: Clock
    fallbacks: Fallbacks
    memories: Memories  # of this rank
    plans: Mapping[int, Plan]  # by the steps done when each begins
    under_way: UnderWay
    phase: int = 0  # the present one's
    installed: list[Installed] = field(default_factory=list)
    phases: dict[int, tuple[list[Installed], Memories]] = field(default_factory=dict)
    reduces: list[LandedReduce] = field(default_factory=list)  # of each unit

    def reshard(self) -> None:
        """Drop gathered weights and what hpZ kept: the next forward gathers anew."""
        for module in self.by_name.values():
            module.reshard()
        for unit in self.installed:
            unit.gather.release()

    @property
    def plan(self) -> Plan:
        return self.plans[self.phase]

    def enter(self, done: int) -> bool:
        """Take the plan of the step after `done` steps, between two passes; returns whether it is
        another one. What both remember in the same way stays."""
        first = max(first for first in self.plans if first <= done)
        if first == self.phase:
            return False
        self._follow(first)
        return True

    def train(self, names: Set[str]) -> None:
        """Plan again: these parameters are trained from now on."""
        self.plans = {first: plan.training(names) for first, plan in self.plans.items()}
        self.add(self.plans)
        self._follow(self.phase)

    def add(self, phases: Iterable[int]) -> None:
        """Have the collectives of these phases at hand."""
        transport = self.installed[0].gather.transport
        for first in phases:
            plan = self.plans[first]
            kept = Memories(plan.memories, self.memories.ranks)
            own = install_later(self.installed, plan.units, transport, self.clock, kept)
            self.phases[first] = own, kept

    def _follow(self, first: int) -> None:
        self.reshard()
        units, kept = self.installed, self.memories
        self.phase, (self.installed, self.memories) = first, self.phases[first]
        for old, new in zip(units, self.installed, strict=True):
            new.follow(old)
        self.memories.go_on(kept)


def wrap(
    model: nn.Module,
    units: Sequence[Blocks],
    plans: Mapping[int, Plan],
    transport: Transport,
    device: torch.device,
    *,
    seed: int,
    ordered: bool,
    cast_inputs: bool = False,
    offload: bool = False,
    ranks: Ranks | None = None,
) -> Wrapped:
    """`fully_shard` each unit and the root, then install the collectives of the first plan; those
    of later phases are at hand. FSDP2 is left untouched where all plans allow it.

    `units`: each one's blocks, without the root; parameters are sharded in place. `ranks`: over
    which, all where there are none.
    """
    plan, recipe = plans[0], plans[0].recipe
    mesh = (ranks or Ranks.pick(None, recipe.cluster)).mesh(recipe.shards, device.type)
    for name, p in model.named_parameters():
        if name in plan.stored:  # the base is in the dtype that is gathered
            p.data = p.data.to(recipe.weights_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=recipe.weights_dtype,
        reduce_dtype=recipe.grads_dtype,
        cast_forward_inputs=cast_inputs,
    )
    offloading = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    by_name = with_root(model, units)
    for name, modules in by_name.items():
        reshard = recipe.config.again and name != ROOT
        try:
            fully_shard(
                list(modules),
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offloading,
                reshard_after_forward=reshard,
            )
        except RuntimeError as error:
            own = dict(model.named_parameters())
            whole = [n for n, p in own.items() if not (p.is_floating_point() or p.is_complex())]
            if not whole or "require gradients" not in str(error):
                raise
            raise ValueError(
                f"{whole[0]} is {own[whole[0]].dtype}, and FSDP2 of torch {torch.__version__} "
                "shards no integers: keep them in buffers, or use torch 2.13"
            ) from error
        for module in modules:  # Trainer shifts labels by the class's name, which FSDP2 changes
            kind = type(module)
            kind.__name__ = kind.__bases__[1].__name__
    # a unit's first module speaks for all: FSDP2 has one state for them
    first = {name: modules[0] for name, modules in by_name.items()}
    sharded: dict[str, FSDPModule] = {n: m for n, m in first.items() if isinstance(m, FSDPModule)}
    set_aside(model, first.values(), plan.stored, device)
    memories = Memories(plan.memories, [transport.rank])
    streams = CudaStreams() if device.type == "cuda" else HostStreams()
    under_way = UnderWay(streams, "grads")
    wrapped = Wrapped(model, sharded, Clock(seed), Fallbacks(), memories, plans, under_way)
    wrapped.phases = dict.fromkeys(plans, ([], memories))
    if not all(is_untouched(each, ordered) for each in plans.values()):
        wrapped.installed = install(
            model,
            first,
            plan.units,
            transport,
            wrapped.clock,
            wrapped.fallbacks,
            device,
            memories,
            wrapped.under_way,
        )
        wrapped.phases[0] = wrapped.installed, memories
        wrapped.add(first for first in plans if first)
        wrapped.reduces = [unit.inside[1] for unit in wrapped.installed]
    elif recipe.cluster.world > 1:
        wrapped.reduces = land(model, first.values(), recipe.cluster.world)
    return wrapped
