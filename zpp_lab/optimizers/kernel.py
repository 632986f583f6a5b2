"""AdamW's update on a GPU by the kernel of cuda/adamw.cu: one call for many parameters, so that
the host's time for a step does not grow with their elements, and hardly with their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpp_lab.ops.backend import use_kernels
from zpp_lab.ops.table import signed
from zpp_lab.optimizers.states import MOMENTS, SCALE


@dataclass(frozen=True, eq=False)
class Parameters:
    """What belongs to some parameters with one kind of state, this rank's rows of each."""

    weights: Sequence[Tensor]  # fp32, contiguous
    grads: Sequence[Tensor]  # fp32
    states: Mapping[str, Sequence[Tensor]]
    offsets: Sequence[int]  # where their rows begin in the step's noise


def serves(weight: Tensor) -> bool:
    """Whether the kernel updates this weight and all beside it."""
    return weight.is_cuda and use_kernels(weight)


def launch(
    these: Parameters,
    group: Mapping[str, Any],
    rates: Tensor,
    roots: Tensor,
    key: int,
    ok: Tensor | None,
) -> None:
    """Update weights and states as the operators in adamw.py do, to the bit.

    rates, roots: fp32 [parameters], `rate` and `root` of a `Piece`. key: of the step's noise.
    """
    first, second = MOMENTS
    operator()(
        these.weights,
        [g if g.is_contiguous() else g.contiguous() for g in these.grads],
        these.states[first],
        these.states[second],
        these.states.get(first + SCALE, ()),
        these.states.get(second + SCALE, ()),
        these.offsets,
        signed(key),
        rates,
        roots,
        ok,
        *group["betas"],
        group["eps"],
        1 - group["lr"] * group["weight_decay"],
    )


def operator() -> Any:
    return torch.ops.zpp_lab.adamw.default
