"""The gradient's sums of squares, in an order that no batching changes.

Rows are filled up with zeros, so that each is summed by the tree of its padded length. Rows of
one length are summed together, which saves launches and changes no bit. On a GPU the kernels of
cuda/ do it all with the same bits: each element is read once and nothing between is written, and
the host starts a launch for 160 rows in place of some hundred small operators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs.kernels import padded_rows
from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.codecs.numerics import left_at_top, square_norms
from zpp_lab.collectives.plan import Plan

FP32, FP64 = 4, 8
ROWS = 160  # of a launch: MAX_ROWS of the kernels
FOLD_NUMEL = 2**25  # elements squared at once: 256 MiB in fp64


def squares(grads: Mapping[str, Tensor], plan: Plan, device: torch.device) -> Tensor:
    """Local shards of gradients by name → fp64 scalar on `device`, added in plan order."""
    return _added(grads, 1, plan, device)[0]


def rank_squares(grads: Mapping[str, Tensor], plan: Plan, device: torch.device) -> Tensor:
    """Whole gradients by name → fp64 [W] on `device`: `squares` of each shard."""
    return _added(grads, plan.recipe.shards, plan, device)


def square_bytes(numels: Sequence[int], by_kernels: bool) -> int:
    """What `squares` allocates at the most for shards of these lengths, in plan order."""
    if not numels:
        return 0
    if by_kernels:
        return room_bytes(numels, 1)
    most, groups = 0, Counter(numels)
    for numel, count in groups.items():
        at_once = min(count, max(1, FOLD_NUMEL // max(1, numel)))
        copied = FP32 if at_once > 1 else 0
        top = FP64 * count * left_at_top(numel)  # of all stacks, in the end twice
        most = max(most, (copied + FP64) * at_once * numel + top, 2 * top)
    return most


def _stacks(grads: Sequence[Tensor], rows: int, numel: int) -> Iterator[Tensor]:
    """Gradients as [k, rows, numel], as many together as FOLD_NUMEL allows."""
    at_once = max(1, FOLD_NUMEL // max(1, rows * numel))
    for first in range(0, len(grads), at_once):
        cut = [padded_rows(g, rows, numel) for g in grads[first : first + at_once]]
        yield torch.stack(cut) if len(cut) > 1 else cut[0][None]


def _added(grads: Mapping[str, Tensor], rows: int, plan: Plan, device: torch.device) -> Tensor:
    """Gradients that are cut into `rows` shards → fp64 [rows], added in plan order."""
    lengths = {p.name: p.shard_numel for u in plan.units for p in u.unit.parameters}
    names = [name for name in lengths if name in grads]
    own, numels = [grads[name] for name in names], [lengths[name] for name in names]
    if serves(own, numels):
        return square_sums(own, numels, rows).to(device)
    groups: dict[int, list[str]] = defaultdict(list)
    for name in names:
        groups[lengths[name]].append(name)
    found: dict[str, Tensor] = {}
    for numel, group in groups.items():
        stacks = _stacks([grads[n] for n in group], rows, numel)
        found |= dict(zip(group, square_norms(stacks), strict=True))
    total = torch.zeros(rows, dtype=torch.float64, device=device)
    for name in names:
        total = total + found[name].to(device)
    return total


def serves(grads: Sequence[Tensor], numels: Sequence[int]) -> bool:
    """Whether the kernels take gradients that are cut into rows of these lengths."""
    if not grads or not all(g.is_cuda and g.dtype == grads[0].dtype for g in grads):
        return False
    if grads[0].dtype not in (torch.float32, torch.bfloat16):
        return False
    return max(numels) < 2**31 and use_kernels(grads[0])


def square_sums(grads: Sequence[Tensor], numels: Sequence[int], rows: int) -> Tensor:
    """Gradients, all fp32 or all bf16, each cut into `rows` rows of its own of `numels`, zeros past
    its end → fp64 [rows]: the squares of a row in the tree of `fold_sum`, gradient after gradient,
    as `numerics.square_norms` has them."""
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
