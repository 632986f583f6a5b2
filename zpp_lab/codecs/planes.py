"""fp32 values as two planes of 16 bits.

high   the value rounded to bf16, to nearest, ties to even
low    int16: the value's bits minus those of `high` followed by zeros, as integers

Both together are the value, with one exception. A value half a step of bf16 above an even one
rounds down to it, and its difference, 2^15, does not fit: `settle` moves it one fp32 step towards
zero first, so the high plane stays what rounding gives. A NaN has the high plane 0x7FC0 and the low
plane 0. The values that two planes hold are those that `settle` leaves alone.

A low plane means nothing next to another high plane than its own: under zeros it would be a NaN.
`row_marks` shows whether rows have changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 1 << 15
NAN = 0x7FC0
ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number: spreads places over words
PIECE = 2**22  # elements marked at a time


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the planes of fp32 values, settled: bf16 and int16 of the same shape."""
    bits = values.contiguous().view(torch.int32)
    even = bits + (HALF - 1) + (bits >> 16 & 1)  # rounded in the upper half
    low = (bits - (even & -65536)).clamp_(max=HALF - 1)
    nan = values.isnan()
    high = (even >> 16).masked_fill_(nan, NAN).to(torch.int16).view(torch.bfloat16)
    return high, low.masked_fill_(nan, 0).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values of two planes."""
    bits = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return bits.add_(low).view(torch.float32)


def settle(values: Tensor) -> None:
    """Move fp32 values that two planes cannot hold one step towards zero, in place."""
    bits = values.view(torch.int32)
    bits.sub_((bits & 0x1FFFF).eq_(HALF).to(torch.int32))


def row_marks(high: Tensor) -> Tensor:
    """Add up the bits of each row of a high plane, times an odd number for their place: int64
    [rows], modulo 2^64."""
    rows = (high.flatten(1) if high.ndim > 1 else high[:, None]).contiguous()
    words = rows.view(torch.int16 if rows.shape[1] % 2 else torch.int32)
    places = (2 * torch.arange(words.shape[1], device=high.device) + 1) * ODD
    some = words.split(max(1, PIECE // words.shape[1]))
    return torch.cat([(part * places).sum(1) for part in some])
