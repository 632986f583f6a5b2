"""Wraps a model's units in FSDP2 as a plan says, with our collectives or with FSDP2's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from zpp_lab.collectives.clock import Clock
from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.transport import Transport
from zpp_lab.engines.fsdp_base import in_param_dtype, set_aside
from zpp_lab.engines.fsdp_comm import Installed, install, land
from zpp_lab.engines.fsdp_packed import Fallbacks
from zpp_lab.engines.units import ROOT, Group, root_group
from zpp_lab.engines.untouched import is_untouched


@dataclass
class Wrapped:
    """A model under FSDP2. `installed` is empty when FSDP2 is left untouched."""

    model: nn.Module
    groups: list[Group]  # units, then the root
    by_name: dict[str, FSDPModule]  # the first module of each, which speaks for all of it
    clock: Clock
    fallbacks: Fallbacks
    installed: list[Installed] = field(default_factory=list)

    def reshard(self) -> None:
        """Drop gathered weights and what hpZ kept: the next forward gathers anew."""
        for module in self.by_name.values():
            module.reshard()
        for unit in self.installed:
            unit.gather.release()


def _mesh(recipe: Recipe, device: torch.device) -> DeviceMesh:
    """All ranks; or nodes × ranks of a node, where FSDP2 shards inside and copies across."""
    if recipe.config.shard == "world":
        return init_device_mesh(device.type, (recipe.cluster.world,), mesh_dim_names=("ranks",))
    shape = (recipe.cluster.nodes, recipe.cluster.gpus_per_node)
    return init_device_mesh(device.type, shape, mesh_dim_names=("nodes", "ranks"))


def wrap(
    model: nn.Module,
    groups: Sequence[Group],
    plan: Plan,
    transport: Transport,
    device: torch.device,
    *,
    seed: int,
    ordered: bool,
    cast_inputs: bool = False,
    offload: bool = False,
) -> Wrapped:
    """`fully_shard` each unit and the root, then install the plan's collectives.

    `groups`: the units' modules, without the root; parameters are sharded in place. The modules of
    one group have one state and one group of parameters in FSDP2.
    """
    recipe = plan.recipe
    mesh = _mesh(recipe, device)
    in_param_dtype(model, plan.stored, recipe.weights_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=recipe.weights_dtype,
        reduce_dtype=recipe.grads_dtype,
        cast_forward_inputs=cast_inputs,
    )
    offloading = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    units = [*groups, root_group(model)]
    for unit in units:
        reshard = recipe.config.stage == 3 and unit.name != ROOT
        fully_shard(
            unit.for_fsdp2,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offloading,
            reshard_after_forward=reshard,
        )
    first = {unit.name: unit.modules[0] for unit in units}
    modules: dict[str, FSDPModule] = {n: m for n, m in first.items() if isinstance(m, FSDPModule)}
    set_aside(model, first.values(), plan.stored, device)
    wrapped = Wrapped(model, units, modules, Clock(seed), Fallbacks())
    if not is_untouched(plan, ordered):
        wrapped.installed = install(
            model, first, plan.units, transport, wrapped.clock, wrapped.fallbacks
        )
    elif recipe.config.shard == "world" and recipe.cluster.world > 1:
        land(first.values(), recipe.cluster.world)
    return wrapped
