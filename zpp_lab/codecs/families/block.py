"""The block integer family: 2, 3, 4, 6 or 8 bits with one scale for each block.

This file is the reference truth. A CUDA kernel must give the same bytes for every input.
All arithmetic is fp32, each operation rounded on its own (no fused multiply-add, no fast
division, denormals kept).

Encode a row of n elements
    1. x is converted to fp32. With a rotation it is rotated, which fills it up with zeros to
       m = coded_numel(n) elements; otherwise m = n.
    2. Blocks are elements [k B, min((k + 1) B, m)). A block never sees past m.
    3. Symmetric, levels q in [-Q, Q], Q = 2^(bits - 1) - 1:
           s = max(max|x| / Q, 2^-126); scale bf16: s rounded to nearest even
           y = x * (1 / s)
           q = nearest even of y, or floor(y + u) with noise u; then clamped to [-Q, Q]
           code = q + 2^(bits - 1)
       Asymmetric, levels q in [0, L], L = 2^bits - 1:
           z = min(x) + 0; scale bf16: z rounded towards minus infinity
           s = max((max(x) - z) / L, 2^-126); scale bf16: s rounded to nearest even
           y = (x - z) * (1 / s)
           q = nearest even of y, or floor(y + u); then clamped to [0, L]; code = q
       2^-126 is the smallest normal number: an all-zero block, a constant block and a block of
       denormals need no case of their own, and 1 / s is always finite.
    4. A block whose z or top = L s + z (symmetric: top = Q s), each times the rotation's size where
       there is one, is not finite stores s = NaN (bits 0x7FC00000, bf16 0x7FC0), z = 0 and codes of
       all zero bits: it decodes to NaN. So a NaN or Inf inside is never turned into numbers, and
       finite values never decode to Inf: every level lies between z and top, and the sums of the
       inverse rotation stay below its size times the larger of them. Values up to 2^126, with a
       rotation of size h 2^126 / h^1.5, decode to finite ones.

Decode
    symmetric x = (code - 2^(bits - 1)) * s; asymmetric x = code * s + z, two roundings;
    with a rotation its inverse follows, and the first n elements are kept.
Decode and sum
    0 + row 0 + row 1 + ... in this order, in the rotated domain; one inverse at the end.

Bytes of one row
    the planes of m codes (`packing.py`: 6 bits are a 4-bit and a 2-bit plane, 3 bits a 2-bit and a
    1-bit one, each plane filled up to 16 bytes), then for each block its scale, or for asymmetric
    codes the pair (s, z), in fp32 or bf16, little-endian, filled up with zeros to 16 bytes.

`ShamCodec` has noise in place of codes, `SignCodec` one bit. `normal.py` has the same bytes with
levels of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zpp_lab.codecs.base import CodecBase, RawCodec, SegmentNoise, encode
from zpp_lab.codecs.hadamard import Rotation
from zpp_lab.codecs.numerics import fold_sum
from zpp_lab.codecs.packing import align, pack, packed_bytes, unpack
from zpp_lab.config.codec import BLOCK_SIZE, check_block

TINY = 2.0**-126  # the smallest normal fp32


@dataclass(frozen=True)
class BlockCodec(CodecBase):
    """Blocks of `block_size` codes of `bits` bits; see the module for numerics and bytes."""

    bits: int = 8
    block_size: int = BLOCK_SIZE
    symmetric: bool = True
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale_dtype: Literal["fp32", "bf16"] = "fp32"
    hadamard: int = 0
    random_signs: bool = False

    def __post_init__(self) -> None:
        check_block(self.bits, self.block_size, self.hadamard, self.random_signs)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: use nearest or stochastic")
        if self.scale_dtype not in ("fp32", "bf16"):
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: use fp32 or bf16")

    @property
    def rotation(self) -> Rotation | None:
        return Rotation(self.hadamard, self.random_signs) if self.hadamard else None

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def levels(self) -> int:
        """The largest q: Q for symmetric codes, L for asymmetric ones."""
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    @property
    def offset(self) -> int:
        """code - q."""
        return 2 ** (self.bits - 1) if self.symmetric else 0

    @property
    def ends(self) -> tuple[int, int]:
        """The codes of the least and of the greatest level."""
        return self.offset - (self.levels if self.symmetric else 0), self.offset + self.levels

    def nblocks(self, numel: int) -> int:
        return -(-self.coded_numel(numel) // self.block_size)

    def nbytes(self, numel: int) -> int:
        each = (4 if self.scale_dtype == "fp32" else 2) * (1 if self.symmetric else 2)
        return packed_bytes(self.coded_numel(numel), self.bits) + align(self.nblocks(numel) * each)

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert out.shape == (x.shape[0], self.nbytes(x.shape[1]))
        if not x.shape[1]:
            return
        x = x.to(torch.float32)
        if self.rotation and not rotated:
            x = self.rotation.forward(x)
        blocks = self._blocks(x)
        scale, zero = self._scales(blocks)
        top, reach = scale * self.levels + zero, self.hadamard or 1
        ok = torch.isfinite(top * reach) & torch.isfinite(zero * reach)
        y = (blocks if self.symmetric else blocks - zero) * (1.0 / scale)
        q = self._round(y, x.shape[1], noise)
        codes = torch.where(ok, q + self.offset, 0.0).to(torch.uint8).flatten(1)
        scale, zero = torch.where(ok, scale, torch.nan), torch.where(ok, zero, 0.0)
        split = packed_bytes(x.shape[1], self.bits)
        pack(codes[:, : x.shape[1]], self.bits, out[:, :split])
        self._write_scales(scale, zero, out[:, split:])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        x = self._dequantize(payload, numel)
        return self.rotation.inverse(x, numel) if self.rotation else x

    def decode_sum(self, payload: Tensor, numel: int, *, rotated: bool = False) -> Tensor:
        total = torch.zeros(payload.shape[1], self.coded_numel(numel), device=payload.device)
        for row in payload:
            total += self._dequantize(row, numel)
        return total if self.rotation is None or rotated else self.rotation.inverse(total, numel)

    def saturated(self, payload: Tensor, numel: int) -> Tensor:
        coded = self.coded_numel(numel)
        codes = unpack(payload[:, : packed_bytes(coded, self.bits)], coded, self.bits)
        lowest, highest = self.ends
        count = ((codes == lowest) | (codes == highest)).sum(-1).double()
        return count / torch.full_like(count, max(coded, 1))

    def _blocks(self, x: Tensor) -> Tensor:
        """Cut fp32 [R, m] into [R, blocks, B], the last element repeated: no range changes."""
        fill = self.nblocks(x.shape[1]) * self.block_size - x.shape[1]
        if fill:
            x = torch.cat((x, x[:, -1:].expand(-1, fill)), dim=1)
        return x.reshape(x.shape[0], -1, self.block_size)

    def _scales(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """s and z, fp32 [R, blocks, 1], as stored but for non-finite blocks."""
        if self.symmetric:
            zero = torch.zeros((), device=blocks.device)
            span = blocks.abs().amax(-1, keepdim=True)
        else:
            zero = blocks.amin(-1, keepdim=True) + 0.0  # -0 becomes +0
            if self.scale_dtype == "bf16":
                zero = _bf16_down(zero)
            span = blocks.amax(-1, keepdim=True) - zero
        # a tensor, since CUDA turns division by a Python number into a product
        levels = torch.full((), float(self.levels), device=blocks.device)
        scale = (span / levels).clamp_min(TINY)
        if self.scale_dtype == "bf16":
            scale = scale.to(torch.bfloat16).to(torch.float32)
        return scale, zero

    def _round(self, y: Tensor, coded: int, noise: SegmentNoise | None) -> Tensor:
        if self.stochastic:
            assert noise is not None, "stochastic rounding needs noise"
            u = noise.uniform(coded, y.device)
            u = torch.nn.functional.pad(u, (0, y[0].numel() - coded)).view(y.shape)
            q = torch.floor(y + u)
        else:
            q = torch.round(y)
        return q.clamp(-self.levels if self.symmetric else 0, self.levels)

    def _write_scales(self, scale: Tensor, zero: Tensor, out: Tensor) -> None:
        both = scale if self.symmetric else torch.cat((scale, zero), dim=-1)
        if self.scale_dtype == "bf16":
            # bf16 values already, but for NaN: their upper halves are exact, and one NaN is stored
            both = (both.contiguous().view(torch.int32) >> 16).to(torch.int16)
        data = both.flatten(1).contiguous().view(torch.uint8)
        out[:, : data.shape[1]] = data
        out[:, data.shape[1] :] = 0

    def _read_scales(self, data: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """uint8 [R, bytes] → s and z, fp32 [R, blocks, 1]."""
        dtype = torch.float32 if self.scale_dtype == "fp32" else torch.bfloat16
        each = 1 if self.symmetric else 2
        used = data[:, : blocks * each * dtype.itemsize].contiguous().view(dtype)
        both = used.to(torch.float32).view(-1, blocks, each)
        return both[..., :1], both[..., -1:]

    def levels_and_scales(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unpack uint8 [R, nbytes(numel)] into levels q in units of s, fp32 [R, blocks, B] (0 past
        the end), s and z, fp32 [R, blocks, 1]; of the rotated row with a rotation."""
        coded, blocks = self.coded_numel(numel), self.nblocks(numel)
        split = packed_bytes(coded, self.bits)
        codes = unpack(payload[:, :split], coded, self.bits)
        scale, zero = self._read_scales(payload[:, split:], blocks)
        q = torch.nn.functional.pad(self._of_codes(codes), (0, blocks * self.block_size - coded))
        return q.view(q.shape[0], blocks, self.block_size), scale, zero

    def _of_codes(self, codes: Tensor) -> Tensor:
        """uint8 → levels, fp32, in units of s."""
        return codes.to(torch.float32) - self.offset

    def _dequantize(self, payload: Tensor, numel: int) -> Tensor:
        """uint8 [R, nbytes(numel)] → fp32 [R, coded_numel(numel)], still rotated."""
        coded = self.coded_numel(numel)
        if not coded:
            return torch.zeros(payload.shape[0], 0, device=payload.device)
        q, scale, zero = self.levels_and_scales(payload, numel)
        x = q * scale
        if not self.symmetric:
            x = x + zero
        return x.flatten(1)[:, :coded]


@dataclass(frozen=True)
class ShamCodec(CodecBase):
    """A noise control that saves nothing: the tensor's own bytes, with noise of a codec's size
    added.

    In each of `codec`'s blocks every element gets noise of its own, uniform in ±a with a^2 / 3 =
    the mean square of what `codec` does to this block's elements. So NMSE is expected to be the
    codec's, whatever its settings, but nothing is rounded: the noise has mean 0 and does not depend
    on where between two levels a value lies. Sums of squares are fp64 `fold_sum`s, y = x + (2 u -
    1) a is fp32, rounded once to `dtype`. A block that `codec` decodes to NaN becomes NaN, and so
    does what leaves the range of `dtype`.
    """

    dtype: torch.dtype
    codec: BlockCodec

    def __post_init__(self) -> None:
        assert not self.codec.stochastic, "the noise has the size of rounding to nearest"

    @property
    def stochastic(self) -> bool:
        return True

    def nbytes(self, numel: int) -> int:
        return RawCodec(self.dtype).nbytes(numel)

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert not rotated, "a sham has no rotation"
        assert noise is not None, "a sham needs noise"
        x, numel = x.to(torch.float32), x.shape[1]
        if not numel:
            return
        reach = self._reach(x).repeat_interleave(self.codec.block_size, 1)[:, :numel]
        y = x + (2 * noise.uniform(numel, x.device) - 1) * reach
        y = y.to(self.dtype)
        RawCodec(self.dtype).encode(torch.where(torch.isfinite(y), y, torch.nan), None, out)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return RawCodec(self.dtype).decode(payload, numel)

    def _reach(self, x: Tensor) -> Tensor:
        """a of each block, fp32 [R, blocks]."""
        numel, size = x.shape[1], self.codec.block_size
        error = self.codec.decode(encode(self.codec, x), numel).double() - x.double()
        padded = torch.nn.functional.pad(error.square(), (0, -numel % size))
        blocks = padded.unflatten(1, (-1, size))
        there = torch.full((blocks.shape[1],), size, dtype=torch.float64, device=x.device)
        there[-1] -= -numel % size
        return (3 * fold_sum(blocks) / there).sqrt().to(torch.float32)


@dataclass(frozen=True)
class SignCodec(CodecBase):
    """One bit an element, its sign, and for each block the mean of its magnitudes.

    Biased, so made for error feedback: 1-bit SGD (Seide et al. 2014) and the scaled sign of error
    feedback (Karimireddy et al. 2019, arXiv:1901.09847), whose scale is the tensor's, not a
    block's. All fp32:

        s = fold_sum(|x| / n) over the block's n elements, NaN where that is not finite
        code = 1 where x >= 0, else 0; it decodes to s or to -s

    Bytes of one row: the plane of codes, then each block's scale, filled up with zeros to 16 bytes.
    """

    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        check_block(8, self.block_size, 0, None)

    def nblocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def nbytes(self, numel: int) -> int:
        return packed_bytes(numel, 1) + align(4 * self.nblocks(numel))

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert not rotated, "the codec sign has no rotation"
        numel = x.shape[1]
        if not numel:
            return
        x, split = x.to(torch.float32), packed_bytes(numel, 1)
        pack((x >= 0).to(torch.uint8), 1, out[:, :split])
        there = torch.full((self.nblocks(numel), 1), float(self.block_size), device=x.device)
        there[-1] -= -numel % self.block_size
        filled = torch.nn.functional.pad(x.abs(), (0, -numel % self.block_size))
        scale = fold_sum(filled.unflatten(1, (-1, self.block_size)) / there)
        scale = torch.where(torch.isfinite(scale), scale, torch.nan).contiguous()
        data = scale.view(torch.uint8)
        out[:, split : split + data.shape[1]] = data
        out[:, split + data.shape[1] :] = 0

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        if not numel:
            return torch.zeros(payload.shape[0], 0, device=payload.device)
        split, blocks = packed_bytes(numel, 1), self.nblocks(numel)
        up = unpack(payload[:, :split], numel, 1) == 1
        scale = payload[:, split : split + 4 * blocks].contiguous().view(torch.float32)
        each = scale.repeat_interleave(self.block_size, 1)[:, :numel]
        return torch.where(up, each, -each)


def _bf16_down(x: Tensor) -> Tensor:
    """Round fp32 to the nearest bf16 value towards minus infinity, as fp32; NaN and Inf stay."""
    bits = x.view(torch.int32)
    cut = bits & -65536
    below = (x < 0) & (cut != bits)  # cutting rounds towards zero: step down once more
    down = torch.where(below, cut + 65536, cut).view(torch.float32)
    return torch.where(torch.isfinite(x), down, x)
