"""Gradients under FSDP2 in the same dtypes with every torch.

Up to torch 2.13 autograd hands over a gradient in the dtype of the gathered weight, and what waits
for a later reduction waits in reduce_dtype. torch 2.15's FSDP2 lets gradients have reduce_dtype at
once: one that autograd makes in fp32 for a bf16 weight (a norm's) is no longer rounded, and with a
narrower reduce_dtype each one is rounded before it is encoded. Runs would then have other bits
than the virtual engine, and than the same run with an older torch. This file takes that back; with
the older ones it finds nothing to do.

Where a bf16 weight is used several times in one pass and autograd makes some of its gradients in
fp32, torch 2.15 adds them up before they are rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


class GradDtypes:
    """Of one unit's gathered parameters."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, torch.dtype]] = []  # parameters, and their reduce_dtype

    def attach(self, parameter: Tensor) -> None:
        """Before the parameter's first backward."""
        wanted = parameter.grad_dtype
        if wanted is None or wanted == parameter.dtype:
            return
        self.waiting.append((parameter, wanted))
        parameter.grad_dtype = None
        parameter.register_hook(partial(_rounded, parameter.dtype))

    def keep(self) -> None:
        """After a backward without a reduction: what it left waits in reduce_dtype."""
        for parameter, wanted in self.waiting:
            if parameter.grad is not None and parameter.grad.dtype != wanted:
                parameter.grad = parameter.grad.to(wanted)

    def own(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], times: Counter[int]
    ) -> Sequence[Tensor]:
        """`grads` of `parameters`, those of one backward in the weight's dtype, without loss.

        times: how many backwards each, by the parameter's id, has gradients of.
        """
        return [
            g.to(p.dtype) if times[id(p)] == 1 and g.itemsize > p.itemsize else g
            for p, g in zip(parameters, grads, strict=True)
        ]


def _rounded(dtype: torch.dtype, grad: Tensor) -> Tensor:
    """To `dtype`'s values; a hook must not change the dtype itself."""
    return grad if grad.dtype == dtype else grad.to(dtype).to(grad.dtype)
