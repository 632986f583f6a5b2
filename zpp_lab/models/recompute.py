"""Activation checkpointing of a block that ends with `h + last(g)`: only its input is kept.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
torch's own hooks every tensor that a forward saves, twice a step, which takes the host longer than
launching the block's kernels. Here a block is one node of the graph, whose backward runs the block
again and the backward of that inside its own. The last product is not computed again, as nothing
needs its result. Bits are those without checkpointing, where a forward uses the block once. The
peak is one tensor of `x`'s size above torch's: autograd keeps the gradient that came in meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Whole = Callable[[Tensor], Tensor]
UntilLast = Callable[[Tensor], tuple[Tensor, Tensor]]


def can_recompute(bypassed: nn.Module, last: nn.Module, x: Tensor) -> bool:
    """Whether `recomputed` serves.

    Not where others look into the block: hooks of the modules whose call backward leaves out,
    adapters, autocast, the compiler. Nor where no gradient of `x` would call it back.
    """
    if torch.compiler.is_compiling():  # first: that of torch 2.11 cannot follow the questions below
        return False
    plain = type(last) is nn.Linear and last.bias is None
    looked_at = _hooked(bypassed) or _hooked(last) or _autocast(x.device.type)
    return plain and not looked_at and x.requires_grad


def _autocast(device: str) -> bool:
    available = torch.amp.is_autocast_available(device)  # type: ignore[attr-defined]
    return bool(available and torch.is_autocast_enabled(device))  # asking elsewhere is an error


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def recomputed(whole: Whole, until_last: UntilLast, last: nn.Module, x: Tensor) -> Tensor:
    """`whole(x)`, of which backward computes `h, g = until_last(x)` again, where
    `whole(x) = h + last(g)`. x floating [..., dim], which `can_recompute`.

    Gradients of parameters go to their `.grad`: for `loss.backward()`, not for `autograd.grad`, nor
    for `backward(inputs=...)`. RuntimeError with `create_graph=True`.
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
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None]:
        _no_graph_of_gradients()
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            h, g = ctx.until_last(x)
            product = _Unneeded.apply(g, ctx.last.weight)  # type: ignore[no-untyped-call]
        del g  # as large as the widest activation, and needed until `product` has gone back alone
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = rows.mm(weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
        return to_x, to_weight


def _no_graph_of_gradients() -> None:
    if torch.is_grad_enabled():  # create_graph=True turns it on here
        raise RuntimeError(
            "gradients of gradients need every activation: use model.checkpoint_activations=false"
        )
