"""fp32 in two planes: exact but for one tie, and the high one is what rounding gives."""

from __future__ import annotations

import torch
from torch import Tensor

from zpp_lab.codecs.planes import joined, settle, split


def values() -> Tensor:
    """Any bits, and those around each value of bf16 and each tie."""
    made = torch.Generator().manual_seed(0)
    some = torch.randint(-(2**31), 2**31, (200_000,), generator=made).to(torch.int32)
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    near = [high + d for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return torch.cat([some, *near]).view(torch.float32)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def test_planes_hold_every_value_but_one_tie() -> None:
    x = values()
    x = x[~x.isnan()]
    high, low = split(x)
    back = joined(high, low)
    assert torch.equal(bits(high), bits(x.to(torch.bfloat16)))
    assert torch.equal(bits(high), bits(back.to(torch.bfloat16)))
    moved = bits(x) != bits(back)
    assert torch.equal(moved, (bits(x) & 0x1FFFF) == 0x8000)
    assert torch.equal(bits(back)[moved], bits(x)[moved] - 1)
    settle(x)
    assert torch.equal(bits(x), bits(back))


def test_nan_stays_nan() -> None:
    x = values()
    x = x[x.isnan()]
    high, low = split(x)
    assert high.isnan().all()
    assert joined(high, low).isnan().all()
    settle(x)
    assert x.isnan().all()
