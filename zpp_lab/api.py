"""Quantized collectives in somebody else's training loop.

    zpp_lab.init()                                        # or torch's own init_process_group
    sharded = zpp_lab.shard(model, "zeropp", units=list(model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

`shard` wraps the units and the root in FSDP2 and gives each the recipe's gather and reduction.
The model stays an ordinary module: its parameters are DTensors, its forward takes what it took.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpp_lab.codecs.numerics import clip_factor, total_norm
from zpp_lab.collectives.peer.choose import Choice, connect, gather_mode
from zpp_lab.collectives.plan import Bytes, Plan, no_bytes
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.collectives.transport import all_gather
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.codec import Dtype
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import ClusterConfig, RecipeConfig
from zpp_lab.engines.fsdp.wrap import Wrapped, wrap
from zpp_lab.engines.norm import squares
from zpp_lab.engines.units import Block, cut_units
from zpp_lab.train.launch.place import enter, placed


def recipe(name: str, *overrides: str) -> RecipeConfig:
    """A recipe of conf/recipe by name, with Hydra overrides such as "recipe.weights.bits=6"."""
    return compose([f"recipe={name}", *overrides]).recipe


def init(backend: str | None = None) -> torch.device:
    """Join the ranks that torchrun or srun started; returns this rank's device. ValueError where
    nobody started any."""
    if not (dist.is_initialized() or placed(os.environ)):
        raise ValueError(
            "zpp_lab.init joins ranks that are there already: start the script with torchrun or "
            "srun, such as `torchrun --standalone --nproc-per-node 4 SCRIPT`"
        )
    enter(os.environ)
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo"))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def this_cluster() -> ClusterConfig:
    """The ranks that are there: torchrun says how many share a node, else all do."""
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    return ClusterConfig(nodes=world // local, gpus_per_node=local)


@dataclass(frozen=True)
class Sharded:
    """A model whose collectives follow a recipe."""

    model: nn.Module
    plan: Plan
    wrapped: Wrapped
    watchdog: Watchdog

    @property
    def bytes(self) -> Bytes:
        """Bytes that this rank sent since the last `reset_bytes`, by wire."""
        total = no_bytes()
        for unit in self.wrapped.installed:
            for wire, traffic in unit.ledger.step.items():
                total[wire] = total[wire] + traffic
        return total

    def reset_bytes(self) -> None:
        for unit in self.wrapped.installed:
            unit.ledger.start_step()

    @torch.no_grad()
    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Clip to `limit`; returns the norm, fp64. Sums in rank order, the same in every run."""
        grads = {
            name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        device = next(iter(grads.values())).device
        own = squares(grads, self.plan, device).view(1)
        every = torch.empty(dist.get_world_size(), dtype=own.dtype, device=device)
        all_gather(every, own)
        norm = total_norm(every[: self.plan.recipe.shards])
        factor = clip_factor(norm, limit)
        for grad in grads.values():
            grad.mul_(factor)
        return norm


def shard(
    model: nn.Module,
    recipe: RecipeConfig | str = "zeropp",
    cluster: ClusterConfig | None = None,
    *,
    units: Sequence[nn.Module] | None = None,
    param_dtype: Dtype = "fp32",
    reduce_dtype: Dtype = "fp32",
    seed: int = 0,
    ordered: bool = False,
    gather: Literal["auto", "flat", "hierarchical"] = "auto",
    timeout_seconds: float = 300.0,
    transport: Choice = "auto",
) -> Sharded:
    """Shard `model` in place; every rank of the default process group calls this alike.

    units: the modules whose parameters travel together, each used in forward as a whole;
        without any, `model.units()` is asked, else all parameters are one unit.
    recipe: a recipe's settings, or its name.
    transport: how bytes get to other ranks (engine.transport).
    ValueError when the recipe does not fit the cluster, or units overlap.
    """
    config = compose([f"recipe={recipe}"]).recipe if isinstance(recipe, str) else recipe
    cluster = cluster or this_cluster()
    blocks = _named(model, units)
    if config.phases:
        raise ValueError(
            f"recipe {config.name}: recipe.phases follow a run's steps, which zpp_lab.shard is not "
            "told: leave them out, or train with `zpp-lab train`"
        )
    checked = Recipe(config, cluster, DTYPES[param_dtype], DTYPES[reduce_dtype])
    if checked.kept:
        raise ValueError(
            f"recipe {config.name}: where nodes keep weights the new ones travel after the update, "
            "of which a loop of your own says nothing: use recipe.sharding.weights=world here, or "
            "`zpp-lab train`"
        )
    plan = Plan.build(cut_units(model, blocks, checked.shards), checked, gather=gather_mode(gather))
    if plan.memories:
        raise ValueError(
            f"recipe {config.name}: memory.kind=residual needs to know whether a step was finite, "
            "which zpp_lab.shard is not told: leave it out, or train with `zpp-lab train`"
        )
    device = _device(model)
    watchdog = Watchdog(timeout_seconds)
    ranks = connect(cluster, watchdog, transport, device)
    wrapped = wrap(
        model, blocks, [plan], ranks, device, seed=seed, ordered=ordered, cast_inputs=True
    )
    follow(model, wrapped)
    return Sharded(model, plan, wrapped, watchdog)


def follow(model: nn.Module, wrapped: Wrapped) -> None:
    """Move the clock with the model's forwards: each with gradients is a moment of its own."""
    clock = wrapped.clock

    def before(*_: Any) -> None:
        clock.grad = torch.is_grad_enabled()
        clock.step += clock.grad
        for unit in wrapped.installed:
            unit.present.taken = []  # nobody here asks which gradients were reduced

    def after(*_: Any) -> None:
        wrapped.fallbacks.check(allowed=False)
        if not torch.is_grad_enabled():
            wrapped.reshard()  # an optimizer may step before the next forward

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)


def _named(model: nn.Module, units: Sequence[nn.Module] | None) -> list[Block]:
    if units is None:
        own = getattr(model, "units", None)
        return list(own()) if callable(own) else []
    names = {id(m): n for n, m in model.named_modules()}
    unknown = [m for m in units if id(m) not in names]
    if unknown:
        raise ValueError(f"unit {type(unknown[0]).__name__} is no module of the model")
    return [(names[id(m)], m) for m in units]


def _device(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    if device.type == "meta":
        raise ValueError("the model is on the meta device: give it weights before shard()")
    return device
