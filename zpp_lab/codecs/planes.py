"""fp32 values as two planes of 16 bits.

high   the value rounded to bf16, to nearest, ties to even
low    int16: the value's bits minus those of `high` followed by zeros, as integers

Both together are the value, with one exception. A value half a step of bf16 above an even one
rounds down to it, and its difference, 2^15, does not fit: `settle` moves it one fp32 step towards
zero first, so the high plane stays what rounding gives. A NaN has the high plane 0x7FC0 and the low
plane 0. The values that two planes hold are those that `settle` leaves alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 1 << 15
NAN = 0x7FC0


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
