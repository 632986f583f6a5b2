"""Sums of squares of many gradients by the kernels of cuda/squares.cu: each element is read once
and nothing between is written, and the host starts a launch for 160 rows in place of some hundred
small operators. The bits are those of `numerics.square_norms`, added in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.codecs.numerics import left_at_top

ROWS = 160  # of a launch: MAX_ROWS of cuda/squares.h


def serves(grads: Sequence[Tensor], numels: Sequence[int]) -> bool:
    """Whether the kernels take gradients that are cut into rows of these lengths."""
    if not grads or not all(g.is_cuda and g.dtype == torch.float32 for g in grads):
        return False
    return max(numels) < 2**31 and use_kernels(grads[0])


def square_sums(grads: Sequence[Tensor], numels: Sequence[int], rows: int) -> Tensor:
    """Gradients fp32, each cut into `rows` rows of its own of `numels`, zeros past its end → fp64
    [rows]: the squares of a row in the tree of `fold_sum`, gradient after gradient."""
    own = [g if g.is_contiguous() else g.contiguous() for g in grads]
    like: dict[str, Any] = {"dtype": torch.float64, "device": own[0].device}
    tops = torch.empty(_room(tuple(numels), rows), **like)
    sums, total = torch.empty(len(own) * rows, **like), torch.empty(rows, **like)
    operator()(own, list(numels), rows, tops, sums, total)
    return total


def room_bytes(numels: Sequence[int], rows: int) -> int:
    """What `square_sums` allocates, all of it fp64."""
    return 8 * (_room(tuple(numels), rows) + len(numels) * rows + rows)


def operator() -> Any:
    return torch.ops.zpp_lab.square_sums.default


@lru_cache
def _room(numels: tuple[int, ...], rows: int) -> int:
    """What the largest launch leaves between its two kernels, in elements."""
    each = [left_at_top(n) for n in numels for _ in range(rows)]
    return max(sum(each[i : i + ROWS]) for i in range(0, len(each), ROWS))
