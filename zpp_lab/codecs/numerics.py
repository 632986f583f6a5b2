"""Sums whose order is fixed by shape alone, so that every engine and device agrees to the bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOP = 2**15  # rows that are so short cost their launches alone


def fold_sum(x: Tensor) -> Tensor:
    """Sum the last dimension pairwise: [..., n] → [...], the same tree for the same n.

    The first half and the second half are added element by element until one is left, so the result
    does not depend on batching, threads or device. The first half of an odd count n has (n + 1) / 2
    elements, and the last of them is not added to: five give x0 + x3, x1 + x4 and x2, then (x0 +
    x3) + x2 and x1 + x4. Filling with zeros to a power of two would give another tree.
    """
    if x.shape[-1] < 2:
        return x[..., 0] if x.shape[-1] else x.new_zeros(x.shape[:-1])
    half = (x.shape[-1] + 1) // 2
    head = x[..., :half].clone()
    head[..., : x.shape[-1] - half] += x[..., half:]
    return _folded(head, 1)[..., 0]


def _folded(x: Tensor, stop: int) -> Tensor:
    """Fold [..., n] as `fold_sum` does to `stop` or fewer, [..., m]. Overwrites halves of x."""
    n = x.shape[-1]
    while n > stop:
        half = (n + 1) // 2
        x[..., : n - half].add_(x[..., half:n])
        n = half
    return x[..., :n].clone()  # a view would keep all of x


def left_at_top(numel: int) -> int:
    """Return how many elements of a row `square_norms` keeps until all rows are folded together."""
    while numel > TOP:
        numel = (numel + 1) // 2
    return numel


def square_norms(stacks: Iterable[Tensor]) -> Tensor:
    """Sum each row's squares: stacks fp32 [k, W, n] of one W and n → fp64 [K, W] of all K together.
    Stacks are taken one by one, and their partial sums are folded together."""
    every = torch.cat([_folded(x.to(torch.float64, copy=True).square_(), TOP) for x in stacks])
    return _folded(every, 1)[..., 0] if every.shape[-1] else every.sum(-1)


def total_norm(partials: Tensor) -> Tensor:
    """Add fp64 [W] sums of squares in rank order and return the norm, an fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=partials.device)
    for partial in partials:
        total = total + partial
    return total.sqrt()


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """Return clip / (norm + 1e-6), at most 1, an fp32 scalar, as torch's clip_grad_norm_."""
    return (clip / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
