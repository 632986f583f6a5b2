"""Sums whose order is fixed by shape alone, so that every engine and device agrees to the bit."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_sum(x: Tensor) -> Tensor:
    """Pairwise sum over the last dimension: [..., n] → [...], the same tree for the same n.

    The first half and the second half are added element by element until one is left, so the
    result does not depend on batching, threads or device.
    """
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        head = x[..., :half].clone()
        head[..., : n - half] += x[..., half:]
        x = head
    return x[..., 0]


def square_norms(rows: Tensor) -> Tensor:
    """fp32 [W, n] → fp64 [W]: each row's sum of squares."""
    return fold_sum(rows.double().square())


def total_norm(partials: Tensor) -> Tensor:
    """fp64 [W] sums of squares by rank → fp64 scalar norm, added in rank order."""
    total = torch.zeros((), dtype=torch.float64, device=partials.device)
    for partial in partials:
        total = total + partial
    return total.sqrt()


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """fp32 scalar: clip / (norm + 1e-6), at most 1 (as torch.nn.utils.clip_grad_norm_)."""
    return (clip / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
