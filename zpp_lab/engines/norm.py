"""The gradient's sums of squares, in an order that no batching changes.

Rows are filled up with zeros, so that each is summed by the tree of its padded length. Rows of
one length are summed together, which saves launches and changes no bit. On a GPU the kernels of
cuda/ do it all with the same bits: each element is read once and nothing between is written, and
the host starts a launch for 160 rows in place of some hundred small operators.

`SquareSums` takes a parameter's sum when its gradient is complete, and adds all at the step's end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
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


class SquareSums:
    """The sums of squares of a rank's gradients in a step, each taken once its gradient is
    complete. `sums`: fp64 [parameters] of those in `names`, in plan order. One without a gradient
    adds 0, which changes no bit."""

    def __init__(self, plan: Plan, names: Container[str], device: torch.device) -> None:
        every = [p for u in plan.units for p in u.unit.parameters if p.name in names]
        self.places = {p.name: (i, p.shard_numel) for i, p in enumerate(every)}
        self.sums = torch.zeros(len(every), dtype=torch.float64, device=device)
        self.known: frozenset[str] = frozenset()  # whose are there
        self.indices: dict[tuple[int, ...], Tensor] = {}  # of places, on the device

    def start(self) -> None:
        """Begin a step."""
        self.known = frozenset()
        self.sums.zero_()

    def take(self, grads: Mapping[str, Tensor]) -> None:
        """Take these by one call, on the current stream, wherever they lie."""
        if not grads:
            return
        self.known = self.known.union(grads)
        placed = sorted((*self.places[name], name) for name in grads)
        places, numels, names = zip(*placed, strict=True)
        found = _each([grads[name] for name in names], numels, 1)[:, 0]
        if places[-1] - places[0] == len(places) - 1:
            self.sums[places[0] : places[-1] + 1] = found
            return
        if places not in self.indices:  # a CUDA graph cannot bring it
            self.indices[places] = torch.tensor(places, device=self.sums.device)
        self.sums.index_copy_(0, self.indices[places], found.to(self.sums.device))

    def of(self, names: Container[str]) -> Tensor:
        """Return those of these parameters, in plan order: fp64 [parameters]."""
        return self.sums[[i for name, (i, _) in self.places.items() if name in names]]

    def total(self) -> Tensor:
        """Add them in plan order: fp64 scalar."""
        return in_order(self.sums[:, None])[0]


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
    if not names:
        return torch.zeros(rows, dtype=torch.float64, device=device)
    return in_order(_each([grads[n] for n in names], [lengths[n] for n in names], rows)).to(device)


def _each(grads: Sequence[Tensor], numels: Sequence[int], rows: int) -> Tensor:
    """Gradients that are cut into `rows` rows of these lengths → fp64 [gradients, rows]."""
    if serves(grads, numels):
        return square_sums(grads, numels, rows)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, numel in enumerate(numels):
        groups[numel].append(i)
    found: dict[int, Tensor] = {}
    for numel, group in groups.items():
        stacks = _stacks([grads[i] for i in group], rows, numel)
        found |= dict(zip(group, square_norms(stacks), strict=True))
    return torch.stack([found[i] for i in range(len(grads))])


def in_order(sums: Tensor) -> Tensor:
    """Add sums fp64 [gradients, rows] one after the other → [rows]."""
    total = torch.zeros_like(sums[0])
    if sums.is_cuda and use_kernels(sums):
        operator("add_in_order")(sums, total)
        return total
    for each in sums:
        total = total + each
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
    its end → fp64 [gradients, rows]: the squares of a row in the tree of `fold_sum`, as
    `numerics.square_norms` has them."""
    own = [g if g.is_contiguous() else g.contiguous() for g in grads]
    like: dict[str, Any] = {"dtype": torch.float64, "device": own[0].device}
    tops = torch.empty(_room(tuple(numels), rows), **like)
    sums = torch.empty(len(own), rows, **like)
    operator("square_sums")(own, list(numels), rows, tops, sums)
    return sums


def room_bytes(numels: Sequence[int], rows: int) -> int:
    """What `square_sums` allocates, all of it fp64."""
    return 8 * (_room(tuple(numels), rows) + len(numels) * rows)


def operator(name: str) -> Any:
    return getattr(torch.ops.zpp_lab, name).default


@lru_cache
def _room(numels: tuple[int, ...], rows: int) -> int:
    """What the largest launch leaves between its two kernels, in elements."""
    each = [left_at_top(n) for n in numels for _ in range(rows)]
    return max(sum(each[i : i + ROWS]) for i in range(0, len(each), ROWS))
