"""TAGC's wire as its public code has it: a count sketch and a bitmap, added up while encoded.

A reference arm, so that what is published can be run beside other recipes: TAGC (Polyakov, Dukhanov
and Spirin 2025, arXiv:2504.05638) with the sketch of Li et al. 2024 ("Accelerating distributed deep
learning using lossless homomorphic compression", arXiv:2402.07529). Sums are linear, so their
domain is this codec's `rotation`: rows of all ranks are added in it, and decoded once.

Encode a row of n elements: whole blocks of B = block_size, G = n // B of them, then a rest
    1. The least magnitude that is kept: the last of `STEPS` below which a share of less than
       `sparsity` lies; so more than 1 - sparsity are kept, as far as the table is coarse.
    2. Every block is added to 3 of the C = ceil(G / ratio) blocks of the sketch, with a sign each.
       Both are MurmurHash3 of the block's number with the seeds 0, 1, 2. In each value the last bit
       is 0 (TAGC has a flag there).
    3. The index has `index_bits` for every element, 1 where it is kept.
    4. The rest travels in fp32.

Sums: sketches in fp32, in rank order; index bytes as numbers modulo 256. With `index_bits=1`, where
two ranks keep the same element their ones add up to a carry: the element's bit is lost, and
its neighbour's is set. TAGC lets NCCL add bytes so.

Decode: an element whose bit is set and that is alone in one of its 3 places is read there and taken
out of the others, round by round; of those left the middle one of the 3 readings counts. Where
more than about 0.82 elements share one place this gets stuck. A row with a NaN or Inf is NaN.

Bytes of one row: sketch and rest in fp32, the index, and as many zeros as the index has bytes.
TAGC all-reduces the index, which moves twice what a reduction does; only the owner needs it.

    pip install ./examples/tagc
    zpp-lab train --config-dir examples/tagc recipe=tagc cluster=1x2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zpp_lab.codecs.base import CodecBase, SegmentNoise
from zpp_lab.codecs.numerics import fold_sum
from zpp_lab.codecs.packing import align, pack, packed_bytes, unpack
from zpp_lab.config.codec import BLOCK_SIZE, CHUNK_SIZES, need

STEPS = (1e-20, 1e-15, 1e-10, 1e-8, *(float(f"{m}e{e}") for e in range(-7, 0) for m in (1, 2, 5)))
HASHES = 3
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SketchSums:
    """The domain in which rows add up."""

    block_size: int = BLOCK_SIZE
    ratio: float = 2.0
    index_bits: int = 1

    def blocks(self, numel: int) -> tuple[int, int]:
        """Of a row and of its sketch."""
        own = numel // self.block_size
        return own, math.ceil(own / self.ratio)

    def widths(self, numel: int) -> list[int]:
        """Of a row in this domain: sketch, rest, bytes of the index as numbers."""
        own, sketch = self.blocks(numel)
        index = packed_bytes(own * self.block_size, self.index_bits)
        return [sketch * self.block_size, numel - own * self.block_size, index]

    def padded(self, numel: int) -> int:
        return sum(self.widths(numel))

    def sketched(self, x: Tensor) -> Tensor:
        """fp32 [R, G, B] → its sketch [R, C, B]."""
        return _projected(x, *_table(*self.blocks(x.shape[1] * self.block_size), x.device))

    def inverse(self, y: Tensor, numel: int) -> Tensor:
        """fp32 [R, padded(numel)] → [R, numel]."""
        sketch, rest, index = y.split(self.widths(numel), dim=1)
        own, few = self.blocks(numel)
        x = y.new_zeros(len(y), own, self.block_size)
        if own:
            wrapped = (index.nan_to_num(0.0).to(torch.int32) & 0xFF).to(torch.uint8)
            live = unpack(wrapped, own * self.block_size, self.index_bits) != 0
            x = self._peeled(sketch.unflatten(1, (few, -1)), live.view(x.shape))
            x = x.masked_fill(~sketch.isfinite().all(1)[:, None, None], torch.nan)
        x = torch.cat((x.flatten(1), rest), dim=1)
        return x.masked_fill(~x.isfinite(), torch.nan)

    def _peeled(self, sketch: Tensor, live: Tensor) -> Tensor:
        """Sketch fp32 [R, C, B] and whose bit is set, bool [R, G, B] → values [R, G, B]."""
        own, few = live.shape[1], sketch.shape[1]
        at, sign = _places(own, few, sketch.device)
        entries, signed = _table(own, few, sketch.device)
        counts = _projected(live.float(), entries, signed.abs())
        out = torch.zeros_like(live, dtype=torch.float32)
        while True:
            read, found = out, torch.zeros_like(live)
            for i in reversed(range(HASHES)):
                alone = live & (counts[:, at[i]] == 1)
                read = torch.where(alone, _cleared(sketch[:, at[i]] * sign[i]), read)
                found |= alone
            if not bool(found.any()):
                break
            out, live = read, live & ~found
            sketch = sketch - _projected(torch.where(found, read, 0.0), entries, signed)
            counts = counts - _projected(found.float(), entries, signed.abs())
        a, b, c = (_cleared(sketch[:, p] * s) for p, s in zip(at, sign, strict=True))
        middle = torch.where((a - b) * (b - c) > 0, b, c)
        middle = torch.where((c - a) * (a - b) > 0, a, middle)
        return torch.where(live, middle, out)


@dataclass(frozen=True)
class SketchCodec(CodecBase):
    """See the module; the defaults are those of TAGC's script, but for its blocks of 1024."""

    block_size: int = BLOCK_SIZE
    sparsity: float = 0.8
    ratio: float = 2.0
    index_bits: int = 1

    def __post_init__(self) -> None:
        need(
            self.block_size in CHUNK_SIZES,
            f"codec=sketch, block_size={self.block_size}: use a power of two, {CHUNK_SIZES}",
        )
        need(0 <= self.sparsity < 1, f"sparsity={self.sparsity}: use 0 or more, and less than 1")
        need(
            self.ratio > 1,
            f"ratio={self.ratio}: use more than 1; a sketch is so many times smaller",
        )
        need(self.index_bits in (1, 4), f"index_bits={self.index_bits}: use 1 or 4")

    @property
    def one_hop(self) -> bool:
        return True

    @property
    def rotation(self) -> SketchSums:
        return SketchSums(self.block_size, self.ratio, self.index_bits)

    def nbytes(self, numel: int) -> int:
        start, index = self._index(numel)
        return start + 2 * index

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert not rotated, "sums of sketches are not encoded again"
        own = self.rotation.blocks(x.shape[1])[0] * self.block_size
        start, index = self._index(x.shape[1])
        out.zero_()
        if own:
            kept = self.kept(x[:, :own].to(torch.float32))
            pack((kept != 0).to(torch.uint8), self.index_bits, out[:, start : start + index])
            blocks = _cleared(kept).unflatten(1, (-1, self.block_size))
            sketch = self.rotation.sketched(blocks).flatten(1)
            out[:, : sketch.shape[1] * 4] = sketch.view(torch.uint8)
        rest = x[:, own:].to(torch.float32).contiguous().view(torch.uint8)
        before = self.rotation.widths(x.shape[1])[0] * 4
        out[:, before : before + rest.shape[1]] = rest

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return self.rotation.inverse(self._loaded(payload, numel), numel)

    def decode_sum(self, payload: Tensor, numel: int, *, rotated: bool = False) -> Tensor:
        total = torch.zeros(payload.shape[1], self.coded_numel(numel), device=payload.device)
        for row in payload:
            total += self._loaded(row, numel)
        return total if rotated else self.rotation.inverse(total, numel)

    def kept(self, x: Tensor) -> Tensor:
        """fp32 [R, n] with zeros in place of what is not sent, by rows."""
        share = math.ceil(float(torch.tensor(self.sparsity * x.shape[-1])))  # rounded to fp32 first
        if not share:
            return x
        # fewer than the share lie below a step where the share's last element does not
        size = abs(x)
        last = size.sort(dim=-1).values[..., share - 1 : share].contiguous()
        steps = torch.tensor((0.0, *STEPS), device=x.device)
        least = steps[torch.bucketize(last, steps[1:], right=True)]
        return torch.where(size < least, 0.0, x)

    def sent(self, x: Tensor) -> Tensor:
        """fp32 [R, n] as its encoder takes it for sent: what memories of TAGC count on."""
        own = self.rotation.blocks(x.shape[1])[0] * self.block_size
        return torch.cat((self.kept(x[:, :own]), x[:, own:]), dim=1)

    def _index(self, numel: int) -> tuple[int, int]:
        """Where it begins in a payload row, and its bytes."""
        sketch, rest, index = self.rotation.widths(numel)
        return align((sketch + rest) * 4), index

    def _loaded(self, payload: Tensor, numel: int) -> Tensor:
        """uint8 [R, nbytes] → fp32 [R, coded_numel]."""
        start, index = self._index(numel)
        values = payload[:, : (self.coded_numel(numel) - index) * 4].contiguous()
        added = payload[:, start : start + index].float()
        return torch.cat((values.view(torch.float32), added), dim=1) if numel else added


def _cleared(x: Tensor) -> Tensor:
    """fp32 with the last bit 0."""
    return (x.contiguous().view(torch.int32) & -2).view(torch.float32)


def _projected(x: Tensor, entries: Tensor, signs: Tensor) -> Tensor:
    """fp32 [R, G, B] → [R, C, B]: of each sum its blocks, as `_table` has them, added pairwise."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 1))  # what fills `entries` up
    return fold_sum((x[:, entries] * signs[:, :, None]).transpose(-1, -2))


@lru_cache(maxsize=256)
def _table(blocks: int, few: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which blocks each place of the sketch adds up, int64 [C, most], and with which signs, fp32;
    filled up with the number of no block."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(few)]
    for block in range(blocks):
        for place, sign in _hashes(block, few):
            found[place].append((block, sign))
    most = max(map(len, found))
    filled = [own + [(blocks, 1.0)] * (most - len(own)) for own in found]
    entries = [[block for block, _ in own] for own in filled]
    signs = [[sign for _, sign in own] for own in filled]
    return torch.tensor(entries, device=device), torch.tensor(signs, device=device)


@lru_cache(maxsize=256)
def _places(blocks: int, few: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The three places of every block, int64 [3, G], and its signs there, fp32 [3, G, 1]."""
    every = [_hashes(block, few) for block in range(blocks)]
    at = [[own[i][0] for own in every] for i in range(HASHES)]
    signs = [[own[i][1] for own in every] for i in range(HASHES)]
    return torch.tensor(at, device=device), torch.tensor(signs, device=device)[:, :, None]


def _hashes(block: int, few: int) -> list[tuple[int, float]]:
    """Places in a sketch of so many blocks, and signs."""
    hashes = [murmur3(block, seed) for seed in range(HASHES)]
    return [(h % few, -1.0 if h >> 31 else 1.0) for h in hashes]


def murmur3(key: int, seed: int) -> int:
    """MurmurHash3 x86_32 (A. Appleby, public domain) of four bytes, the lowest first."""
    h = seed ^ _turned(key * 0xCC9E2D51, 15) * 0x1B873593 & WORD
    h = (_turned(h, 13) * 5 + 0xE6546B64) & WORD ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def _turned(word: int, left: int) -> int:
    word &= WORD
    return (word << left | word >> 32 - left) & WORD
