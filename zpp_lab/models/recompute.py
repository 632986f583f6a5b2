"""Activation checkpointing of a block that ends with `h + last(g)`: only its input is kept.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
torch's own hooks every tensor that a forward saves, twice a step: at 1.3B some 700 microseconds of
the host a block, more than the block's kernels are launched in. Here a block is one node of the
graph, whose backward runs the block again and the backward of that inside its own. The last
product is not computed again, as nothing needs its result. Bits are those without checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Whole = Callable[[Tensor], Tensor]
UntilLast = Callable[[Tensor], tuple[Tensor, Tensor]]


def can_recompute(last: nn.Module, x: Tensor) -> bool:
    """Whether `recomputed` serves: not where others look into the block (hooks of its modules,
    adapters, the compiler), nor where no gradient of `x` would call it back."""
    hooks = (last._forward_hooks, last._forward_pre_hooks, last._backward_hooks)
    plain = type(last) is nn.Linear and last.bias is None
    looked_at = any(hooks) or bool(last._backward_pre_hooks)
    return plain and not looked_at and x.requires_grad and not torch.compiler.is_compiling()


def recomputed(whole: Whole, until_last: UntilLast, last: nn.Module, x: Tensor) -> Tensor:
    """`whole(x)`, of which backward computes `h, g = until_last(x)` again, where
    `whole(x) = h + last(g)`. x floating [..., dim], which `can_recompute`.

    Gradients go to `.grad` of the parameters, so `backward` must be called, not `autograd.grad`.
    """
    out: Tensor = _Recomputed.apply(whole, until_last, last, x)  # type: ignore[no-untyped-call]
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Whole, until_last: UntilLast, last: nn.Linear, x: Tensor
    ) -> Tensor:
        ctx.until_last, ctx.last = until_last, last
        ctx.save_for_backward(x)
        return whole(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            h, g = ctx.until_last(x)
            product = _Unneeded.apply(g, ctx.last.weight)  # type: ignore[no-untyped-call]
        torch.autograd.backward((h, product), (grad, grad))
        return None, None, None, x.grad


class _Unneeded(torch.autograd.Function):
    """`F.linear(x, weight)` whose value nobody reads: its backward alone, by the calls that
    autograd makes for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(1).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = rows.mm(weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
        return to_x, to_weight
