"""The Walsh-Hadamard rotation that a block codec may apply before it takes scales.

Groups of `size` neighbouring elements are multiplied by the orthonormal Hadamard matrix,
which spreads an outlier over its group. It is its own inverse. With `random_signs` each
element is first multiplied by a fixed sign (Suresh et al., "Distributed mean estimation with
limited communication", ICML 2017, use fresh signs; fixed ones need no key at the decoder and
let two hops of a reduction share a domain).

Numerics, to the bit: fp32; sign; butterflies (a + b, a - b) at strides 1, 2, 4 ... size / 2
in this order; then one multiplication by fp32(1 / sqrt(size)). The inverse runs the same
butterflies and multiplication, then the sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zpp_lab.codecs.noise import philox
from zpp_lab.config.codec import HADAMARD_SIZES as SIZES


@dataclass(frozen=True)
class Rotation:
    """A Hadamard rotation of groups of `size` elements."""

    size: int
    random_signs: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"hadamard={self.size}: use 0 (off) or one of {SIZES}")

    def padded(self, numel: int) -> int:
        """Return the elements after the last group is filled up with zeros."""
        return -(-numel // self.size) * self.size

    def forward(self, x: Tensor) -> Tensor:
        """Rotate fp32 [..., n] into fp32 [..., padded(n)]."""
        x = torch.nn.functional.pad(x, (0, self.padded(x.shape[-1]) - x.shape[-1]))
        groups = x.unflatten(-1, (x.shape[-1] // self.size, self.size))
        if self.random_signs:
            groups = groups * signs(self.size).to(x.device)
        return self._transform(groups).reshape(x.shape)

    def inverse(self, y: Tensor, numel: int) -> Tensor:
        """Rotate fp32 [..., padded(numel)] back into fp32 [..., numel]."""
        groups = self._transform(y.unflatten(-1, (y.shape[-1] // self.size, self.size)))
        if self.random_signs:
            groups = groups * signs(self.size).to(y.device)
        return groups.reshape(y.shape)[..., :numel]

    def _transform(self, groups: Tensor) -> Tensor:
        shape, stride = groups.shape, 1
        while stride < self.size:
            a, b = groups.reshape(*shape[:-1], self.size // stride // 2, 2, stride).unbind(-2)
            groups, stride = torch.stack((a + b, a - b), dim=-2), stride * 2
        norm = torch.tensor(1.0 / math.sqrt(self.size), dtype=torch.float32, device=groups.device)
        return groups.reshape(shape) * norm


@cache
def sign_words() -> tuple[int, ...]:
    """Return 256 fixed bits as eight 32-bit words: bit i % 32 of word i // 32 set means sign -1 for
    element i of a group; smaller groups take the first ones. Words 0 to 3 are the output of
    Philox4x32-7 (`noise.py`) for counter (0, 0, 0, 0), words 4 to 7 for (1, 0, 0, 0), both with the
    key 0x5A50505F4C4142, which is "ZPP_LAB" in ASCII."""
    zero = torch.zeros(2, dtype=torch.int64)
    words = philox((torch.arange(2), zero, zero, zero), key=0x5A50505F4C4142)
    return tuple(int(words[i % 4][i // 4]) for i in range(8))


@cache
def signs(size: int) -> Tensor:
    """Return fp32 [size] of +1 and -1."""
    words = sign_words()
    return torch.tensor([1.0 - 2.0 * (words[i // 32] >> (i % 32) & 1) for i in range(size)])
