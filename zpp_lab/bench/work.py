"""The work that the kernel benchmark measures: operators on one or many segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab import ops
from zpp_lab.codecs import BlockCodec, Noise, RawCodec
from zpp_lab.codecs.errors import SUMS
from zpp_lab.layout import Layout

SUMMED = 4  # K, payload rows of a reduction
BF16 = torch.bfloat16
NOISE = Noise(0x5EED, (1,), (0,))
OPS = ("encode", "decode", "reduce", "decode_sum", "decode_sum_encode")


@dataclass(frozen=True)
class Work:
    """`prepare` makes one buffer set and returns the call on it; `nbytes` must move in a call."""

    nbytes: int
    prepare: Callable[[], Callable[[], object]]


def payload_of(layout: Layout, rows: int = 1) -> Tensor:
    """uint8 [rows, nbytes] of encoded normal values."""
    out = torch.empty(rows, layout.nbytes, dtype=torch.uint8, device="cuda")
    for row in out:
        values = [torch.randn(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        ops.encode(layout, values, NOISE, row[None])
    return out


def work(op: str, layout: Layout) -> Work:
    """One operator on bf16 values of a layout, R = 1; sums have K = 4 rows."""
    n, row = layout.numel, layout.nbytes
    moved = {
        "encode": 2 * n + row,
        "encode with errors": 2 * n + row,
        "decode": row + 2 * n,
        "reduce": SUMMED * row + 2 * n,
        "decode_sum": SUMMED * row + 8 * n,
        "decode_sum_encode": SUMMED * row + row,
    }
    return Work(moved[op], lambda: _prepare(op, layout))


def _prepare(op: str, layout: Layout) -> Callable[[], object]:
    out = torch.empty(1, layout.nbytes, dtype=torch.uint8, device="cuda")
    if op == "encode":
        values = [torch.randn(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        return lambda: ops.encode(layout, values, NOISE, out)
    if op == "encode with errors":
        values = [torch.randn(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        shape = (1, len(layout.segments), len(SUMS))
        errors = torch.empty(shape, dtype=torch.float64, device="cuda")
        return lambda: ops.encode(layout, values, NOISE, out, errors)
    if op == "decode":
        one = payload_of(layout)
        outs = [torch.empty(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        return lambda: ops.decode(layout, one, outs)
    rows = payload_of(layout, SUMMED)[:, None]
    if op == "reduce":
        plain = torch.empty(1, layout.numel, device="cuda", dtype=BF16)
        return lambda: ops.reduce(layout, rows, plain)
    if op == "decode_sum":
        sums = torch.zeros(1, layout.coded_numel, device="cuda")
        return lambda: ops.decode_sum(layout, rows, sums)
    return lambda: ops.decode_sum_encode(layout, layout, rows, NOISE, out)


def copy_work(nbytes: int) -> Work:
    """A device copy that moves `nbytes` in all, half read and half written."""

    def prepare() -> Callable[[], object]:
        source = torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Work(nbytes, prepare)


def fill_work(nbytes: int) -> Work:
    """Writes alone: what a mix with many writes can reach at most."""

    def prepare() -> Callable[[], object]:
        target = torch.empty(nbytes // 4, dtype=torch.float32, device="cuda")
        return lambda: target.fill_(1.0)

    return Work(nbytes, prepare)


def one_segment(codec: BlockCodec, numel: int) -> Layout:
    return Layout.build(["weight"], [numel], [codec])


def decoder_block(codec: BlockCodec, shards: int) -> Layout:
    """A rank's shard of a 13B decoder block: 10 segments, its norms sent as they are."""
    dim, ffn = 5120, 13824
    numels = [dim * dim] * 4 + [dim * ffn] * 3 + [dim] * 3
    codecs = [codec] * 7 + [RawCodec(BF16)] * 3
    names = [f"segment{i}" for i in range(10)]
    return Layout.build(names, [n // shards for n in numels], codecs)
