"""A frozen base as its ranks keep it: encoded once, at the start, and never again.

Each rank's rows of a parameter are one row of the payload, as on the wires. So blocks are cut by
the rows that a rank has, and the decoded base depends on the number of ranks, as the weights of
any quantized gather do; for one number of ranks it is the same in every engine, run and step.

Checkpoints do not hold the base. They hold a mark of each of its parameters, which any engine on
any cluster can take and which tells another base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zpp_lab.codecs import kernels
from zpp_lab.codecs.layout import Layout, Segment

Marks = dict[str, Tensor]  # parameter → int64 [1 + dimensions]: sum, then the whole shape

_PIECE = 2**22  # elements of a mark's sum at a time, and of parameters added up at once
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number: spreads places over words


def encode_shards(segment: Segment, whole: Tensor, shards: int) -> Tensor:
    """The first `shards` rows of the payload of one parameter: uint8 [shards, segment.nbytes].

    whole: float, the rows' elements in order, filled up with zeros.
    """
    alone = Layout.build([segment.name], [segment.numel], [segment.codec])
    out = torch.empty(shards, segment.nbytes, dtype=torch.uint8, device=whole.device)
    kernels.encode(alone, [kernels.padded_rows(whole, shards, segment.numel)], None, out)
    return out


def decode_shards(segment: Segment, payload: Tensor, out: Tensor) -> None:
    """Payload uint8 [W, nbytes] → the whole parameter, in out's dtype.

    ValueError when it holds a NaN or Inf, or did before it was encoded.
    """
    alone = Layout.build([segment.name], [segment.numel], [segment.codec])
    kernels.decode(alone, payload, [out])
    if not bool(torch.isfinite(out).all()):
        raise ValueError(
            f"{segment.name} of the frozen base is not finite, or has numbers outside its codec's "
            "range: correct the weights that the run starts from"
        )


def mark(rows: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """Of rows [first, ...) of a parameter of `shape`, fp32: int64 [1 + len(shape)]."""
    total = mark_sum(rows.reshape(-1), first * math.prod(shape[1:]))
    return torch.tensor([int(total), *shape], dtype=torch.int64)


def mark_sum(flat: Tensor, start: int) -> Tensor:
    """Of the elements from `start` on, fp32: int64 on their device.

    The sum of each element's bits times an odd number for its place, modulo 2^64: marks of parts
    add up to the whole's, in any order.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for at in range(0, flat.numel(), _PIECE):
        bits = flat[at : at + _PIECE].contiguous().view(torch.int32)
        places = torch.arange(bits.numel(), device=flat.device)  # int64, and so are the products
        total += (2 * (start + at) + 1) * bits.sum(dtype=torch.int64) + 2 * (bits * places).sum()
    return total * _ODD


@torch.no_grad()
def mark_all(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add up the bits of several tensors, one behind the other: int64 on the device."""
    total, start, some = torch.zeros((), dtype=torch.int64, device=device), 0, []
    for i, shard in enumerate(shards, 1):  # small ones together, to save launches
        some.append(shard.reshape(-1).to(device, torch.float32))
        numel = sum(map(len, some))
        if numel > _PIECE or i == len(shards):
            total += mark_sum(torch.cat(some) if len(some) > 1 else some[0], start)
            start, some = start + numel, []
    return total


def check_marks(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """ValueError, naming a parameter, when a checkpoint stands on another base than this run's."""
    if found := differing(own, saved):
        raise ValueError(
            f"the checkpoint's adapters belong to another frozen base; {found[0]} differs: "
            "start from the weights that the checkpoint's run started from"
        )


def differing(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """The parameters whose marks differ, or that only one of both has."""
    both = own.keys() & saved.keys()
    same = {n for n in both if torch.equal(own[n].cpu(), saved[n].cpu())}
    return sorted({*own, *saved} - same)
