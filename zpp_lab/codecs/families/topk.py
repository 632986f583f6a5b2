"""Sparse rows: of each chunk the elements of greatest magnitude, with their places.

For gradients whose encoder remembers what it has left out (`kernels/memory.py`): without that, all
but `keep` elements of a chunk are lost for good (Stich, Cordonnier and Jaggi, "Sparsified SGD with
memory", NeurIPS 2018, arXiv:1809.07599). Chunks keep places short, each log2(chunk) bits, and
bytes in closed form; SparseLoCo sends chunks of 4096 so (Sarfi, Therien, Lidin and Belilovsky
2025, arXiv:2508.15706). TAGC makes some layers sparse and leaves others whole (Polyakov et al.
2025, arXiv:2504.05638), which is what rules of a recipe are for.

This file is the reference truth. Nothing is computed but comparisons of integers; what `bits` do to
values is block.py's arithmetic. On a GPU with Triton one kernel chooses, in one pass over x, where
torch builds 8-byte keys, selects among them and sorts: the same elements, so the same bits.

Encode a row of n elements
    1. x is converted to fp32. Chunks are elements [c B, min((c + 1) B, n)), B = block_size. A whole
       chunk keeps k = keep elements, a last one of r < B elements ceil(k r / B).
    2. A chunk whose greatest magnitude, rounded to the type of raw values (with bits: fp32), is not
       finite keeps its first elements as NaN.
    3. Another one keeps the greatest |x|, compared as the 31 low bits of fp32; of equal ones those
       that come first. Kept elements lie in the order of the row.
    4. Their values, m of a row, are what the codec `none` makes of [m] elements; with bits what the
       codec `block` makes of them in blocks of k, so that a scale serves one chunk.

Decode
    Kept places have their decoded values, all others +0. A chunk whose first value is NaN is NaN,
    all of it: a NaN or Inf anywhere in it, or a block of codes that decodes to NaN.

Bytes of one row
    the places of kept elements in their chunks, m codes of log2(B) bits in planes (`packing.py`),
    then the bytes of m values by the codec `none` or `block`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

from zpp_lab.codecs.base import CodecBase, RawCodec, SegmentNoise
from zpp_lab.codecs.families.block import BlockCodec
from zpp_lab.codecs.kernels.backend import triton_serves
from zpp_lab.codecs.packing import pack, packed_bytes, unpack
from zpp_lab.config.codec import BLOCK_SIZE, check_topk

AT_ONCE = 2**22  # elements whose keys are held at a time, 8 bytes each
MAGNITUDE = 0x7FFFFFFF  # of fp32's bits
MOST = 8192  # elements of a chunk that one program of the kernel holds
INFINITE = {  # the least magnitude that is infinite once rounded
    torch.float32: math.inf,
    torch.bfloat16: float.fromhex("0x1.ffp127"),
    torch.float16: 65520.0,
}


@dataclass(frozen=True)
class TopKCodec(CodecBase):
    """`keep` elements of each `block_size`, their values in `dtype` or in `bits` bits; see the
    module. The last three settings are those of codes."""

    dtype: torch.dtype
    keep: int
    block_size: int = BLOCK_SIZE
    bits: int | None = None
    symmetric: bool = True
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale_dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        check_topk(self.keep, self.block_size, self.bits)

    @cached_property
    def values(self) -> RawCodec | BlockCodec:
        """The codec of the values that are sent."""
        if self.bits is None:
            return RawCodec(self.dtype)
        return BlockCodec(self.bits, self.keep, self.symmetric, self.rounding, self.scale_dtype)

    @property
    def stochastic(self) -> bool:
        return self.values.stochastic

    @property
    def place_bits(self) -> int:
        return self.block_size.bit_length() - 1

    def kept(self, numel: int) -> int:
        """Return how many of a row's elements are sent."""
        whole, rest = divmod(numel, self.block_size)
        return whole * self.keep - (-self.keep * rest // self.block_size)

    def nbytes(self, numel: int) -> int:
        kept = self.kept(numel)
        return packed_bytes(kept, self.place_bits) + self.values.nbytes(kept)

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert not rotated, "topk has no rotation"
        assert out.shape == (x.shape[0], self.nbytes(x.shape[1]))
        if not x.shape[1]:
            return
        places, values = self._chosen(x)
        split = packed_bytes(places.shape[1], self.place_bits)
        pack(places, self.place_bits, out[:, :split])
        self.values.encode(values, noise, out[:, split:])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        kept = self.kept(numel)
        split = packed_bytes(kept, self.place_bits)
        chunk = torch.arange(kept, device=payload.device) // self.keep
        in_chunk = unpack(payload[:, :split], kept, self.place_bits)
        values = self.values.decode(payload[:, split:], kept)
        # +0, or NaN in chunks whose first value is NaN; then the values at their places
        bad = values[:, :: self.keep].isnan()[:, :, None]
        x = values.new_zeros(len(values), bad.shape[1], self.block_size)
        rows = x.masked_fill_(bad, torch.nan).flatten(1)
        return rows.scatter_(1, in_chunk + chunk * self.block_size, values)[:, :numel]

    def saturated(self, payload: Tensor, numel: int) -> Tensor:
        """Return each row's share of saturated codes that are sent, float [R]."""
        kept = self.kept(numel)
        split = packed_bytes(kept, self.place_bits)
        return self.values.saturated(payload[:, split:], kept)

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose from x, [R, n > 0]; returns what `_choose` gives of all chunks."""
        if self.block_size <= MOST and x.dtype in INFINITE and triton_serves(x):
            return self._chosen_at_once(x)
        chosen = [self._choose(c, keep) for c, keep in self._chunks(x.to(torch.float32))]
        places, values = (torch.cat(parts, dim=1) for parts in zip(*chosen, strict=True))
        return places, values

    def _chosen_at_once(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose by the kernel; places are int32."""
        dtype = self.dtype if self.bits is None else torch.float32
        rows, numel = x.shape
        kept, chunks = self.kept(numel), -(-numel // self.block_size)
        places = x.new_empty(rows, kept, dtype=torch.int32)
        values = x.new_empty(rows, kept, dtype=torch.float32)
        bad = x.new_empty(rows, kept, dtype=torch.uint8)
        _choose_kernel[(chunks, rows)](
            x.contiguous(), places, values, bad, numel, kept, INFINITE[dtype], self.keep,
            self.block_size, num_warps=4 if self.block_size <= 2048 else 16,
        )  # fmt: skip
        # torch writes the NaN: devices round one to bf16 in other ways
        return places, values.to(dtype).masked_fill_(bad.view(torch.bool), torch.nan)

    def _chunks(self, x: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield parts [R, chunks, size] of fp32 [R, n] in order, and how many each chunk keeps."""
        size, whole = self.block_size, x.shape[1] // self.block_size
        if whole:
            chunks = x[:, : whole * size].unflatten(1, (whole, size))
            for part in chunks.split(max(1, AT_ONCE // (size * len(x))), dim=1):
                yield part, self.keep
        if x.shape[1] % size:
            yield x[:, None, whole * size :], self.kept(x.shape[1] % size)

    def _choose(self, chunks: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Choose `keep` of each chunk of fp32 [R, chunks, size]. Returns their places in the chunk,
        int64, and values in their type, each [R, chunks keep]."""
        dtype = self.dtype if self.bits is None else torch.float32
        magnitude = chunks.view(torch.int32) & MAGNITUDE
        greatest = magnitude.amax(-1, keepdim=True).view(torch.float32)  # NaN above all
        finite = torch.isfinite(greatest.to(dtype))
        size = chunks.shape[-1]
        late = torch.arange(size - 1, -1, -1, device=chunks.device)
        # no two keys are equal, so which ones are the greatest is never open
        keys = torch.where(finite, magnitude, 0).long() * size + late
        found = keys.topk(keep, dim=-1, sorted=False).values
        places = (size - 1 - found % size).sort(dim=-1).values
        values = chunks.gather(-1, places).to(dtype).masked_fill(~finite, torch.nan)
        return places.flatten(1), values.flatten(1)


# ---------------------------------------------------------------------- on a GPU


if triton is not None:

    @triton.jit  # type: ignore[misc]
    def _choose_kernel(
        x, places, values, bad, numel, kept, infinite, KEEP: tl.constexpr, SIZE: tl.constexpr
    ):  # type: ignore[no-untyped-def]
        """A chunk of a row. The least magnitude that is kept is found bit by bit, from the highest;
        of those equal to it the first fill up what the greater ones leave."""
        chunk, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        lane = tl.arange(0, SIZE)
        size = tl.minimum(numel - chunk * SIZE, SIZE).to(tl.int32)
        keep = (KEEP * size + SIZE - 1) // SIZE
        inside = lane < size
        value = tl.load(x + row * numel + chunk * SIZE + lane, inside, other=0.0).to(tl.float32)
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        finite = tl.max(magnitude, 0).to(tl.float32, bitcast=True) < infinite  # NaN is not
        magnitude = tl.where(inside, tl.where(finite, magnitude, 0), -1)
        least = 0
        for i in range(31):
            higher = least | (1 << (30 - i))
            enough = tl.sum((magnitude >= higher).to(tl.int32), 0) >= keep
            least = tl.where(enough, higher, least)
        above = (magnitude > least).to(tl.int32)
        equal = (magnitude == least).to(tl.int32)
        taken = above + equal * (tl.cumsum(equal, 0) <= keep - tl.sum(above, 0)).to(tl.int32)
        at = row * kept + chunk * KEEP + tl.cumsum(taken, 0) - 1
        tl.store(places + at, lane, taken > 0)
        tl.store(values + at, value, taken > 0)
        tl.store(bad + at, tl.where(finite, 0, taken), taken > 0)
