"""The block family with levels for normal numbers, which trained weights, and gradients after a
rotation, nearly are. Bytes, blocks, rotations and what is not finite are as in `block.py`.

    s = max(max|x|, 2^-126); scale bf16: s rounded to nearest even
    code = how many thresholds lie below x * (1 / s); it decodes to levels[code] * s

`levels_of` has the levels: those of least squared error (Lloyd 1982, Max 1960) for normal numbers
up to the largest of a block. NF4 (Dettmers et al. 2023, arXiv:2305.14314) has quantiles in their
place, the same for all block sizes; that the best ones depend on them is Yoshida's (2023,
arXiv:2306.06965). None of them is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from zpp_lab.codecs.base import SegmentNoise
from zpp_lab.codecs.families.block import BlockCodec
from zpp_lab.config.codec import check_normal


@dataclass(frozen=True)
class NormalCodec(BlockCodec):
    """Blocks of `block_size` codes of 2, 3 or 4 bits; see the module for numerics and bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normal(self.bits, self.symmetric, self.rounding)

    @property
    def levels(self) -> int:
        return 1  # no level lies beyond s

    @property
    def offset(self) -> int:
        return 0

    @property
    def ends(self) -> tuple[int, int]:
        return 0, 2**self.bits - 1

    def _round(self, y: Tensor, coded: int, noise: SegmentNoise | None) -> Tensor:
        _, thresholds = _tables(self.bits, self.block_size, y.device)
        return torch.bucketize(y, thresholds, out_int32=True)

    def _of_codes(self, codes: Tensor) -> Tensor:
        levels, _ = _tables(self.bits, self.block_size, codes.device)
        return levels[codes.int()]


@cache
def levels_of(bits: int, block_size: int) -> tuple[float, ...]:
    """Return the 2^bits levels of `NormalCodec`, rising, in units of a block's largest magnitude.
    For normal numbers cut off at that one's median each level is the mean of the numbers nearest to
    it. Found by Lloyd's iteration in fp64 and rounded to fp32."""
    normal, count = NormalDist(), 2**bits
    end = normal.inv_cdf((1 + 0.5 ** (1 / block_size)) / 2)
    levels = [end * (2 * i + 1 - count) / count for i in range(count)]
    for _ in range(2000):
        edges = [-end, *[(a + b) / 2 for a, b in pairwise(levels)], end]
        before, levels = (
            levels,
            [
                (normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a))
                for a, b in pairwise(edges)
            ],
        )
        if max(abs(a - b) for a, b in zip(before, levels, strict=True)) < 1e-13:
            break
    even = [(b - a) / (2 * end) for a, b in zip(levels, reversed(levels), strict=True)]
    return tuple(float(torch.tensor(-x, dtype=torch.float32)) for x in even)


@cache
def _tables(bits: int, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return levels and thresholds half-way between them, fp32. Uploaded once a device."""
    levels = levels_of(bits, block_size)
    thresholds = [(a + b) / 2 for a, b in pairwise(levels)]
    return (
        torch.tensor(levels, dtype=torch.float32, device=device),
        torch.tensor(thresholds, dtype=torch.float32, device=device),
    )
