"""AdamW's update on a GPU: the call of cuda/optim/adamw.cu.

It takes many parameters at once, so the host's time for a step does not grow with their elements,
and hardly with their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.codecs.kernels.table import signed
from zpp_lab.engines.optim.states import MOMENTS, SCALE


def serves(state: Tensor) -> bool:
    """Return whether the kernel updates all weights, on the device of this part of their state."""
    return state.is_cuda and use_kernels(state)


def launch(
    weights: Sequence[Tensor],
    low: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    offsets: Sequence[int],
    group: Mapping[str, Any],
    rates: Tensor,
    roots: Tensor,
    key: int,
    ok: Tensor | None,
    factor: Tensor | None,
) -> None:
    """Update weights and states as the operators in adamw.py do, to the bit. weights, grads: fp32,
    this rank's rows of parameters with one kind of state; weights are contiguous. low: their low
    planes, if weights are high ones; then grads are bf16. factor: multiplies gradients, which stay.
    states: by key. offsets: where rows begin in the step's noise, whose key is `key`. rates, roots:
    fp32 [parameters], `rate` and `root` of a `RowBlock`."""
    first, second = MOMENTS
    operator()(
        weights,
        low,
        [g if g.is_contiguous() else g.contiguous() for g in grads],
        states[first],
        states[second],
        states.get(first + SCALE, ()),
        states.get(second + SCALE, ()),
        offsets,
        signed(key),
        rates,
        roots,
        ok,
        factor,
        *group["betas"],
        group["eps"],
        1 - group["lr"] * group["weight_decay"],
    )


def operator() -> Any:
    return torch.ops.zpp_lab.adamw.default
