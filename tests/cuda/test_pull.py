"""Which bytes the kernels read of rows that lie in several places, compiled for the host: every
codec's values, no byte outside a row, each tile once, and the order in which ranks are visited."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cuda.host import compiled, load_by_nvcc, with_compiler, with_operators
from tests.ops import cases
from zpp_lab.codecs import BlockCodec, RawCodec, encode
from zpp_lab.layout import Layout
from zpp_lab.ops import Rows, reference
from zpp_lab.ops.table import incoming

pytestmark = with_compiler
SPECS = [
    BlockCodec(bits, block, symmetric, "nearest", scale)  # type: ignore[arg-type]
    for bits, symmetric, scale, block in itertools.product(
        (2, 4, 6, 8), (True, False), ("fp32", "bf16"), (16, 64, 256, 1024, 2048, 8192)
    )
]
LENGTHS = (1, 15, 1000, 1024, 8192, 8193, 20_011)


@pytest.fixture(scope="module")
def decode_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    library = ctypes.CDLL(str(compiled("host_pull", tmp_path_factory.mktemp("host"))))
    return library.decode_rows  # type: ignore[no-any-return]


def call(
    run: Callable[..., int], layout: Layout, rows: list[Tensor], order: list[int], near: int
) -> tuple[Tensor, list[int]]:
    """The second segment of each row, decoded to where `order` says, and the entries by turn."""
    segment, count = layout.segments[1], len(rows)
    codec, numel = segment.codec, segment.numel
    assert isinstance(codec, BlockCodec)
    parts = -(-numel // 8192)
    out = torch.full((count, numel), torch.nan)
    turns, visits = (ctypes.c_int * (count * parts))(), (ctypes.c_int * (count * parts))()
    wrong = run(
        (ctypes.c_void_p * count)(*(r.data_ptr() for r in rows)), (ctypes.c_int * count)(*order),
        count, near, ctypes.c_int64(layout.nbytes), ctypes.c_int64(segment.offset),
        ctypes.c_int64(numel), codec.bits, codec.block_size.bit_length() - 1, codec.symmetric,
        codec.scale_dtype == "bf16", ctypes.c_void_p(out.data_ptr()), turns, visits,
    )  # fmt: skip
    assert wrong == 0, "a byte outside the row, or of the wrong place"
    assert set(visits) == {1}, "each tile of each row once"
    return out, list(turns)


@pytest.mark.parametrize("codec", SPECS, ids=str)
def test_every_value_comes_from_its_row(codec: BlockCodec, decode_rows: Callable[..., int]) -> None:
    for numel in LENGTHS:
        layout = Layout.build(["a", "b"], [33, numel], [BlockCodec(4, 64), codec])
        segment, order = layout.segments[1], [2, 0, 1]
        whole = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
        part = encode(codec, torch.randn(3, numel, generator=torch.Generator().manual_seed(numel)))
        whole[:, segment.offset :] = part
        rows = [whole[i].clone() for i in order]
        out, _ = call(decode_rows, layout, rows, order, 1)
        assert torch.equal(out, codec.decode(part, numel))


@pytest.mark.parametrize(("count", "near"), [(2, 1), (4, 1), (8, 2), (3, 0), (4, 4), (1, 1)])
def test_near_tiles_lie_evenly_among_the_others(
    count: int, near: int, decode_rows: Callable[..., int]
) -> None:
    """Far rows come one after another; in any `count` turns `near` tiles are near."""
    codec, numel = BlockCodec(2, 8192), 5 * 8192
    layout = Layout.build(["a", "b"], [1, numel], [codec, codec])
    rows = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(count)]
    _, turns = call(decode_rows, layout, rows, list(range(count)), near)
    far = [t for t in turns if t >= near]
    assert far == sorted(far)
    for start in range(0, len(turns), count):
        assert sum(t < near for t in turns[start : start + count]) == near


@with_operators
def test_the_operators_plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Segments of several codecs, exempt and empty ones, more than one launch takes, parameters
    that end inside the last row: the operator makes plans whose values are the reference's."""
    load_by_nvcc("host_pull_ops", tmp_path_factory.mktemp("host"))
    run = torch.ops.zpp_host.pull_decode.default
    codecs = [*SPECS[::5], RawCodec(torch.float32), BlockCodec(4, 64), BlockCodec(2, 64)]
    numels = [[20_011, 8192, 3, 1000][i % 4] for i in range(len(codecs) - 1)] + [0]
    layout = Layout.build([f"p{i}" for i in range(len(codecs))], numels, codecs)
    assert len(codecs) > 18
    count, made = 3, torch.Generator().manual_seed(1)
    sources = [torch.randn(count * n, generator=made)[: count * n - n // 3] for n in numels]
    payload = cases.poisoned(count, layout.nbytes)
    reference.encode(layout, sources, None, payload)
    rows = Rows(tuple(payload[i].clone() for i in (1, 2, 0)), (1, 2, 0), 1)
    want, got = ([torch.full_like(s, 9.0) for s in sources] for _ in range(2))
    reference.decode(layout, payload, want)
    run(rows.table, incoming(layout).rows, got, 0)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        cases.same(f"segment {i}", a, b)
    with pytest.raises(RuntimeError, match="too short"):
        run(rows.columns(0, layout.nbytes - 16).table, incoming(layout).rows, got, 0)
    wide = Rows(tuple(torch.zeros(3, layout.nbytes + 16, dtype=torch.uint8)), (0, 1, 2))
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        run(wide.columns(8, layout.nbytes).table, incoming(layout).rows, got, 0)
