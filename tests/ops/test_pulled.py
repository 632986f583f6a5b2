"""Rows in W buffers of their own give the bits of the contiguous payload, by the kernels.

The reference's side of it runs on any machine: `tests/collectives/test_pulls.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import cases
from zpp_lab import ops
from zpp_lab.codecs import BlockCodec, Codec, Noise, RawCodec
from zpp_lab.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BF16, FP32 = torch.bfloat16, torch.float32
# odd, tiny, empty, whole tiles and more, a tile and one element
LENGTHS = (20_011, 3, 0, 8192, 300_000, 8193, 65_536)


@pytest.fixture(autouse=True, scope="module")
def _kernels():  # type: ignore[no-untyped-def]
    ops.configure("cuda")
    yield
    ops.configure("auto")


def layout_of(codec: Codec) -> Layout:
    """Segments of all lengths, of which some are exempt and travel as their own bytes; more than
    one launch takes."""
    exempt = {1: RawCodec(BF16), 4: RawCodec(FP32), 8: RawCodec(BF16)}
    lengths = LENGTHS * 3
    codecs = [exempt.get(i, codec) if n else BlockCodec() for i, n in enumerate(lengths)]
    return Layout.build([f"w{i}" for i in range(len(lengths))], lengths, codecs)


def rows_of(layout: Layout, count: int, shards: int = 1) -> Tensor:
    """uint8 [count, shards, nbytes]."""
    found = cases.poisoned(count, shards, layout.nbytes, device="cuda")
    for i, rows in enumerate(found):
        draw = torch.Generator("cuda").manual_seed(i)
        xs = [torch.randn(shards * s.numel, device="cuda", generator=draw) for s in layout.segments]
        ops.encode(layout, xs, Noise(7, (i,) * shards, tuple(range(shards))), rows)
    return found


def codecs() -> list[BlockCodec]:
    found = [BlockCodec(b, 256, sym) for b in (2, 4, 6, 8) for sym in (True, False)]
    found += [BlockCodec(b, 64, scale_dtype="bf16", hadamard=64) for b in (2, 4, 6, 8)]
    return [*found, BlockCodec(4, 8192), BlockCodec(8, 16, False, hadamard=16, random_signs=True)]


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("codec", codecs(), ids=str)
def test_decode(codec: BlockCodec, count: int) -> None:
    layout = layout_of(codec)
    payload = rows_of(layout, count)[:, 0]
    for dtype, multiprocessors in ((BF16, 0), (FP32, 3)):
        outs = [torch.full((count * n,), 3.0, dtype=dtype, device="cuda") for n in LENGTHS * 3]
        outs[0] = outs[0][:-5]  # a parameter that ends inside the last row
        pulled = [torch.full_like(o, 7.0) for o in outs]
        order = [(i + 1) % count for i in range(count)]
        parts = tuple(payload[i].clone() for i in order)
        ops.decode(layout, payload, outs)
        ops.decode(layout, ops.Rows(parts, tuple(order), 1, multiprocessors), pulled)
        for i, (a, b) in enumerate(zip(pulled, outs, strict=True)):
            cases.same(f"segment {i}", a, b.cpu())


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("codec", codecs(), ids=str)
def test_sums(codec: BlockCodec, count: int) -> None:
    """`reduce`, and the middle of two hops, with fewer multiprocessors than there are."""
    layout, after = layout_of(codec), layout_of(BlockCodec(4, 2048, rounding="stochastic"))
    payload = rows_of(layout, count, shards=2)
    apart = ops.senders([p.clone() for p in payload], 8)
    for dtype in (BF16, FP32):
        want = torch.full((2, layout.numel), 3.0, dtype=dtype, device="cuda")
        got = torch.full_like(want, 7.0)
        ops.reduce(layout, payload, want)
        ops.reduce(layout, apart, got)
        cases.same("reduce", got, want.cpu())
    noise = Noise(9, (1, 2), (0, 1))
    want, got = (cases.poisoned(2, after.nbytes, device="cuda") for _ in range(2))
    ops.decode_sum_encode(layout, after, payload, noise, want)
    ops.decode_sum_encode(layout, after, apart, noise, got)
    cases.same_payload("decode_sum_encode", after, got, want.cpu())


def test_too_many_rows_are_refused() -> None:
    layout = Layout.build(["w"], [100], [BlockCodec()])
    parts = [cases.poisoned(1, layout.nbytes, device="cuda") for _ in range(ops.MAX_ROWS + 1)]
    with pytest.raises(RuntimeError, match="up to 16"):
        ops.reduce(layout, ops.senders(parts), torch.zeros(1, 100, device="cuda"))


def test_short_rows_are_refused() -> None:
    layout = Layout.build(["w"], [100], [BlockCodec()])
    parts = (cases.poisoned(layout.nbytes - 16, device="cuda"),)
    with pytest.raises(RuntimeError, match="too short"):
        ops.decode(layout, ops.Rows(parts, (0,)), [torch.zeros(100, device="cuda")])
