"""How AdamW's two moments are kept in two bytes or one an element.

Blocks are `BLOCK` neighbours in a row (all dimensions but the first) and start again at every row,
and an element's noise depends on its place in the row alone. Sharding cuts between rows, so a
shard's bytes are the whole tensor's, on any number of ranks. A parameter whose rows have fewer
than `SHORT` elements (norms, biases) keeps fp32: its scales would weigh more than it saves.

bf16
    the fp32 bits plus 16 random ones, cut to the upper half. To nearest, a second moment would
    never fall where 1 - beta2 is less than half a step (0.2 to 0.4 %).
8bit, block-wise as Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise
Quantization" (2022), with other codes
    scale s = max|x| of the block, fp32; y = |x| / s in [0, 1]
    y keeps three mantissa bits: first moments to nearest (halves up), second ones at random as in
    bf16, and for the same reason. Codes are the steps below 1.0: second moments take 255 and reach
    1.1 * 2^-32, first moments take 126 either side of zero and reach 1.25 * 2^-16.
A second moment never becomes zero in a block that is not: a zero under the root would turn the
first moment into a huge update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from zpp_lab.codecs.noise import LANES, philox

StateKind = Literal["fp32", "bf16", "8bit"]

BLOCK = 256
SHORT = 16
CUT = 20  # mantissa bits that 8 bits do not keep
ONE = 127 << 3  # 1.0 in eight exponent and three mantissa bits
TINY = 2.0**-126
MOMENTS = ("exp_avg", "exp_avg_sq")  # the first is signed
SCALE = "_scale"
DTYPES: dict[StateKind, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "8bit": torch.uint8,
}


def kind_of(shape: Sequence[int], kind: StateKind) -> StateKind:
    """Return the kind of state that a parameter of this whole shape gets."""
    return kind if prod(shape[1:]) >= SHORT else "fp32"


def blocks_of(shape: Sequence[int]) -> int:
    """Count the blocks of one row."""
    return -(-prod(shape[1:]) // BLOCK)


def state_bytes(shape: Sequence[int], kind: StateKind) -> int:
    """Return the bytes of both moments of a parameter, or of a shard with as many rows."""
    return 2 * sum(moment_bytes(shape, kind))


def moment_bytes(shape: Sequence[int], kind: StateKind) -> tuple[int, ...]:
    """Return the bytes of one moment: its values, and in 8 bits its scales."""
    numel = prod(shape)
    match kind_of(shape, kind):
        case "fp32":
            return (4 * numel,)
        case "bf16":
            return (2 * numel,)
    return numel, 4 * shape[0] * blocks_of(shape)


def noise_key(seed: int, step: int) -> int:
    """Return the 64-bit Philox key of a step's noise: as `codecs/noise.py` makes one, but of the
    nine letters "optimizer", the seed and the step from 0 on."""
    data = b"optimizer" + seed.to_bytes(8, "little") + step.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2s(data, digest_size=8).digest(), "little")


def row_noise(seed: int, step: int, numel: int, device: torch.device) -> Tensor:
    """Draw int32 [numel] of 16 random bits each by seed, step and place: element e has word (e % 8)
    // 2 of Philox4x32-7 for the counter (e // 8, 0, 0, 0), its low half for even e."""
    key = noise_key(seed, step)
    groups = torch.arange(-(-numel // LANES), dtype=torch.int64, device=device)
    zero = torch.zeros_like(groups)
    words = philox((groups, zero, zero, zero), key)
    halves = torch.stack([h for w in words for h in (w & 0xFFFF, w >> 16)], dim=-1)
    return halves.flatten()[:numel].to(torch.int32)


def to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 [rows, n] with noise, int32 [n] of 16 bits, to bf16 [rows, n]. Overwrites x."""
    bits = x.view(torch.int32)
    return bits.add_(noise).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


def encode(x: Tensor, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode fp32 [rows, n] to codes, uint8 [rows, n], and scales, fp32 [rows, k], a block's
    largest. Without noise (int32 [n] of 16 bits each) rounded to nearest. A block with a NaN or Inf
    gets a scale that is not finite. Overwrites x."""
    negative = (x < 0) if signed else None
    scale = _amax(x.abs_())
    _by_block(x, scale.clamp_min(TINY), torch.Tensor.div_)
    levels = 127 if signed else 255
    more = 1 << (CUT - 1) if noise is None else noise << (CUT - 16)
    bits = x.view(torch.int32).add_(more).bitwise_right_shift_(CUT)
    codes = bits.sub_(ONE - levels).clamp_(0, levels).to(torch.uint8)
    if negative is not None:
        codes += negative.to(torch.uint8) << 7
    return codes, scale


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Invert `encode`: fp32 [rows, n]."""
    bits = codes.to(torch.int32)
    if not signed:
        x = bits.add_(ONE - 255).bitwise_left_shift_(CUT).view(torch.float32)
        return _by_block(x, scale, torch.Tensor.mul_)
    sign = (codes >> 7).to(torch.int32) << 31
    zero = bits.bitwise_and_(127) == 0
    bits.add_(ONE - 127).bitwise_left_shift_(CUT).bitwise_or_(sign)
    x = bits.view(torch.float32).masked_fill_(zero, 0.0)
    return _by_block(x, scale, torch.Tensor.mul_)


def _amax(x: Tensor) -> Tensor:
    """Return each block's largest, [rows, k], of [rows, n]; an empty x has empty scales."""
    n = x.shape[1]
    if not x.numel():
        return x.new_zeros(x.shape[0], -(-n // BLOCK))
    cut = n // BLOCK * BLOCK
    parts = []
    if cut:
        parts.append(x[:, :cut].unflatten(1, (-1, BLOCK)).amax(-1))
    if cut < n:
        parts.append(x[:, cut:].amax(-1, keepdim=True))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _by_block(x: Tensor, scale: Tensor, op) -> Tensor:  # type: ignore[no-untyped-def]
    """Compute x op its block's scale, in place."""
    cut = x.shape[1] // BLOCK * BLOCK
    if cut:
        op(x[:, :cut].unflatten(1, (-1, BLOCK)), scale[:, : cut // BLOCK, None])
    if cut < x.shape[1]:
        op(x[:, cut:], scale[:, -1:])
    return x
