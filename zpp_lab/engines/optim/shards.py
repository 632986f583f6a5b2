"""torch's AdamW on the shards that a rank has of DTensors.

Given DTensors, torch works out for each operator of the update how lists of hundreds of parameters
are sharded. For operators that take every element by itself that says nothing, and in the first
step of a model of 40 layers it took the host seconds.

`is_sharded` tells DTensors without importing their module, which takes a second. Where nobody has
imported it there are none, as in the virtual engine and in `zpp-lab plan`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zpp_lab.engines.optim.states import MOMENTS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

LEANS_ON = {"torch.distributed.tensor.DTensor": ("_local_tensor",)}  # a test looks for it


def is_sharded(t: Any) -> TypeGuard[DTensor]:
    """Return whether `t` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Any) -> Tensor:
    """Return this rank's part of `t`, outside of any graph."""
    # a step asks some thousand times, and `to_local` takes the host microseconds each time
    return t._local_tensor if is_sharded(t) else t


def sharded_as(p: Tensor, own: Tensor, shape: Sequence[int]) -> Tensor:
    """Wrap `own` as this rank's rows of a tensor of `shape` that is sharded as `p` is, on its own
    device; `DTensor.from_local` would move it to the mesh's device."""
    if not is_sharded(p):
        return own
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, own.dtype)
    spec = DTensorSpec(p.device_mesh, p.placements, tensor_meta=meta)
    return DTensor(own, spec, requires_grad=False)  # type: ignore[call-arg]


def detached(p: Tensor) -> Tensor:
    """Return `p` outside of any graph. Its own `detach` refuses rows that lie on another device
    than its gradients (engine.place)."""
    return sharded_as(p, local(p).detach(), p.shape)


def gradients(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradients that are there, of this rank's rows, by parameter."""
    every = (p for group in optimizer.param_groups for p in group["params"])
    return {p: local(p.grad) for p in every if p.grad is not None}


class ShardAdamW(torch.optim.AdamW):
    """torch.optim.AdamW with its bits and its state; parameters are DTensors or tensors."""

    def zero_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before its first update, sharded as it is."""
        step = torch.zeros((), device=p.device if self.defaults["fused"] else "cpu")
        return {"step": step} | {key: torch.zeros_like(p) for key in MOMENTS}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.update(gradients(self))

    factor: Tensor | None = None

    def begin(self, number: int, ok: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Begin a step, in which `update` takes each parameter once. Where `ok`, a bool scalar on
        the device of fused updates, is false, nothing changes. Gradients are multiplied by
        `factor`, an fp32 scalar."""
        self.factor, self.grad_scale = factor, None
        self.found_inf = None if ok is None else (~ok).float()

    @torch.no_grad()
    def update(self, grads: Mapping[Tensor, Tensor]) -> None:
        """Update parameters with these gradients of their rows, which may be overwritten."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p in grads]
            if trained:
                self._update(group, trained, [grads[p] for p in trained])

    def _update(self, group: dict[str, Any], trained: list[Tensor], grads: list[Tensor]) -> None:
        for p in trained:
            if p not in self.state:
                self.state[p] = self.zero_state(p.detach())
        if self.factor is not None:
            torch._foreach_mul_(grads, self.factor.to(grads[0].device))
        states = [self.state[p] for p in trained]
        first, second = ([local(s[key]) for s in states] for key in MOMENTS)
        beta1, beta2 = group["betas"]
        adamw(
            [local(p) for p in trained],
            grads,
            first,
            second,
            [],
            [s["step"] for s in states],
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
