"""The gradient's sums of squares, in an order that no batching changes.

Rows are filled up with zeros, so that each is summed by the tree of its padded length. Rows of
one length are summed together, which saves launches and changes no bit. On a GPU with kernels
`codecs/kernels/squares.py` does it all, with the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zpp_lab.codecs.kernels import padded_rows
from zpp_lab.codecs.kernels import squares as kernels
from zpp_lab.codecs.numerics import left_at_top, square_norms
from zpp_lab.collectives.plan import Plan

FP32, FP64 = 4, 8
FOLD_NUMEL = 2**25  # elements squared at once: 256 MiB in fp64


def squares(grads: Mapping[str, Tensor], plan: Plan, device: torch.device) -> Tensor:
    """Local shards of gradients by name → fp64 scalar on `device`, added in plan order."""
    return _added(grads, 1, plan, device)[0]


def rank_squares(grads: Mapping[str, Tensor], plan: Plan, device: torch.device) -> Tensor:
    """Whole gradients by name → fp64 [W] on `device`: `squares` of each rank's shards."""
    return _added(grads, plan.recipe.cluster.world, plan, device)


def square_bytes(numels: Sequence[int], by_kernels: bool) -> int:
    """What `squares` allocates at the most for shards of these lengths, in plan order."""
    if not numels:
        return 0
    if by_kernels:
        return kernels.room_bytes(numels, 1)
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
    if kernels.serves(own, numels):
        return kernels.square_sums(own, numels, rows).to(device)
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
