"""Sums whose order is fixed by shape alone, so that every engine and device agrees to the bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOP = 2**15  # rows that are so short cost their launches alone


def fold_sum(x: Tensor) -> Tensor:
    """Pairwise sum over the last dimension: [..., n] → [...], the same tree for the same n.

    The first half and the second half are added element by element until one is left, so the
    result does not depend on batching, threads or device. The first half of an odd
    count n has (n + 1) / 2 elements, and the last of them stays as it is: five give x0 + x3,
    x1 + x4 and x2, then (x0 + x3) + x2 and x1 + x4. Filling with zeros to a power of two would
    give another tree.
    """
    if x.shape[-1] < 2:
        return x[..., 0] if x.shape[-1] else x.new_zeros(x.shape[:-1])
    half = (x.shape[-1] + 1) // 2
    head = x[..., :half].clone()
    head[..., : x.shape[-1] - half] += x[..., half:]
    return _folded(head, 1)[..., 0]


def _folded(x: Tensor, stop: int) -> Tensor:
    """What `fold_sum` has left at `stop` or fewer: [..., n] → [..., m]. Sums replace the first
    halves in x."""
    n = x.shape[-1]
    while n > stop:
        half = (n + 1) // 2
        x[..., : n - half].add_(x[..., half:n])
        n = half
    return x[..., :n].clone()  # a view would keep all of x


def left_at_top(numel: int) -> int:
    """How many elements `square_norms` keeps of a row until all rows are folded together."""
    while numel > TOP:
        numel = (numel + 1) // 2
    return numel


def square_norms(stacks: Iterable[Tensor]) -> Tensor:
    """Stacks fp32 [k, W, n] of one W and n → fp64 [K, W] of all K together: each row's sum of
    squares. Stacks are taken one by one, and what is left of them is folded together."""
    tops = [_folded(x.to(torch.float64, copy=True).square_(), TOP) for x in stacks]
    every = torch.cat(tops)
    return _folded(every, 1)[..., 0] if every.shape[-1] else every.sum(-1)


def total_norm(partials: Tensor) -> Tensor:
    """fp64 [W] sums of squares by rank → fp64 scalar norm, added in rank order."""
    total = torch.zeros((), dtype=torch.float64, device=partials.device)
    for partial in partials:
        total = total + partial
    return total.sqrt()


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """fp32 scalar: clip / (norm + 1e-6), at most 1 (as torch.nn.utils.clip_grad_norm_)."""
    return (clip / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
