"""Wraps a model's units in FSDP2 as a plan says, with our collectives or with FSDP2's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from zpp_lab.collectives.clock import Clock
from zpp_lab.collectives.transport import Transport
from zpp_lab.engines.fsdp_comm import Fallbacks, Installed, install
from zpp_lab.plan import Plan
from zpp_lab.recipe import quantizes_any


@dataclass
class Wrapped:
    """A model under FSDP2. `installed` is empty when FSDP2 is left untouched."""

    model: nn.Module
    modules: Sequence[FSDPModule]
    clock: Clock
    fallbacks: Fallbacks
    installed: list[Installed] = field(default_factory=list)

    def reshard(self) -> None:
        """Drop gathered weights and what hpZ kept: the next forward gathers anew."""
        for module in self.modules:
            module.reshard()
        for unit in self.installed:
            unit.gather.release()


def is_untouched(plan: Plan, ordered: bool) -> bool:
    """Whether the recipe asks for nothing that FSDP2 itself does not do."""
    config = plan.recipe.config
    plain = not config.secondary and config.hops == 1 and config.order == "rank"
    asked = ordered or not plain or quantizes_any(plan.recipe)
    return plan.recipe.cluster.world == 1 or not asked


def wrap(
    model: nn.Module,
    units: Sequence[tuple[str, nn.Module]],
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

    `units` are names and modules, without the root; parameters are sharded in place.
    """
    recipe = plan.recipe
    mesh = init_device_mesh(device.type, (recipe.cluster.world,), mesh_dim_names=("ranks",))
    policy = MixedPrecisionPolicy(
        param_dtype=recipe.weights_dtype,
        reduce_dtype=recipe.grads_dtype,
        cast_forward_inputs=cast_inputs,
    )
    offloading = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    wrapped_units = [*units, ("root", model)]
    for name, module in wrapped_units:
        reshard = recipe.config.stage == 3 and name != "root"
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offloading,
            reshard_after_forward=reshard,
        )
    modules = [m for _, m in wrapped_units if isinstance(m, FSDPModule)]
    wrapped = Wrapped(model, modules, Clock(seed), Fallbacks())
    if not is_untouched(plan, ordered):
        wrapped.installed = install(
            model, dict(wrapped_units), plan.units, transport, wrapped.clock, wrapped.fallbacks
        )
    return wrapped
