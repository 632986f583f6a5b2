"""Payload rows that no one tensor holds: each lies where its rank encoded it.

Kernels read them there, so that their own loads are the transfer between GPUs of a host; plain
torch copies them together first. The bits are those of the same rows in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_ROWS = 16  # that a kernel takes: its table travels with its plan in 4 KB (cuda/plan.h)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as `decode` or the sums take them, in this GPU's memory or in a peer's.

    parts: to decode, uint8 [n] each, the first `near` of them in this GPU's memory, the others in
        the order in which they shall be read; to sum, the K senders' uint8 [R, n], in the order
        of the sum.
    order: to decode, which row each part is; to sum, 0 ... K - 1.
    multiprocessors: how many a kernel that reads them may take; 0: all.
    """

    parts: tuple[Tensor, ...]
    order: tuple[int, ...]
    near: int = 0
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        first = self.parts[0]
        assert sorted(self.order) == list(range(len(self.parts))), "each row once"
        assert all(p.shape == first.shape and p.dtype == torch.uint8 for p in self.parts)
        assert all(p.stride() == first.stride() for p in self.parts), "alike in memory"
        assert first.numel() == 0 or first.stride(-1) == 1, "rows are contiguous"

    def stacked(self) -> Tensor:
        """One tensor of them all, uint8 [K, ...]: a copy."""
        places = dict(zip(self.order, self.parts, strict=True))
        return torch.stack([places[i] for i in range(len(self.parts))])

    def columns(self, start: int, count: int) -> Rows:
        """So many bytes of each row."""
        parts = tuple(p[..., start : start + count] for p in self.parts)
        return Rows(parts, self.order, self.near, self.multiprocessors)

    def flip(self, dim: int) -> Rows:
        """The senders in the other order, as a tensor's."""
        assert dim == 0, "senders are the first dimension"
        assert list(self.order) == list(range(len(self.parts))), "rows of a sum"
        return Rows(self.parts[::-1], self.order, 0, self.multiprocessors)

    @cached_property
    def table(self) -> Tensor:
        """The columns `Around` of cuda/pull_bindings.cpp, then addresses and rows."""
        first = self.parts[0]
        pitch, shards = (first.stride(0), first.shape[0]) if first.dim() == 2 else (0, 1)
        columns = [self.near, first.shape[-1], pitch, shards]
        for part, row in zip(self.parts, self.order, strict=True):
            columns += [part.data_ptr(), row]
        return torch.tensor(columns, dtype=torch.int64)


Payload = Tensor | Rows


def whole(payload: Payload) -> Tensor:
    """The payload in one tensor."""
    return payload.stacked() if isinstance(payload, Rows) else payload


def one_of(payload: Payload) -> Tensor:
    """A tensor that lies where the payload is read."""
    return payload.parts[0] if isinstance(payload, Rows) else payload


def cut(payload: Payload, start: int, count: int) -> Tensor:
    """So many bytes of each row, in one tensor."""
    if isinstance(payload, Rows):
        return payload.columns(start, count).stacked()
    return payload[..., start : start + count]


def senders(parts: Sequence[Tensor], multiprocessors: int = 0) -> Rows:
    """Rows to sum, each sender's uint8 [R, n], in this order."""
    return Rows(tuple(parts), tuple(range(len(parts))), 0, multiprocessors)
