"""Segments of outside codecs beside the kernels' own: their torch code runs, and only there.

Without a GPU the kernels are left out: what must be seen is that an outside segment gets its
bytes and sums, and that the kernels' segments are left alone. With one, whole layouts are run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.codecs.kernels import cases
from zpp_lab.codecs import BlockCodec, Codec, Noise
from zpp_lab.codecs import kernels as ops
from zpp_lab.codecs.kernels import cuda, reference
from zpp_lab.codecs.layout import Layout


class Outside(BlockCodec):
    """A subclass may change anything: no kernel knows it."""


NUMELS = (100, 257, 100, 64, 257)  # the last is stacked with the second
ROWS = 2
NOISE = Noise(5, (0, 1), (0, 1))
BEFORE: tuple[Codec, ...] = (
    BlockCodec(4, 64),
    Outside(4, 64, rounding="stochastic"),
    BlockCodec(8, 64, hadamard=32),
    Outside(8, 32, hadamard=32),
    Outside(4, 64, rounding="stochastic"),
)
AFTER: tuple[Codec, ...] = (
    BlockCodec(8),
    Outside(2, 64),
    BlockCodec(4, 64, hadamard=32),
    Outside(4, 64, rounding="stochastic", hadamard=32),
    Outside(2, 64),
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that do nothing but say that they were called."""
    called: list[str] = []
    fakes = {
        name: SimpleNamespace(default=lambda *_, name=name: called.append(name))
        for name in cuda.NAMES
    }
    fake = SimpleNamespace(ops=SimpleNamespace(zpp_lab=SimpleNamespace(**fakes)))
    monkeypatch.setattr(cuda, "torch", fake)
    return called


def layouts(outside_only: bool) -> tuple[Layout, Layout]:
    keep = [i for i, c in enumerate(BEFORE) if not outside_only or isinstance(c, Outside)]
    names, numels = [f"w{i}" for i in keep], [NUMELS[i] for i in keep]
    return (
        Layout.build(names, numels, [BEFORE[i] for i in keep]),
        Layout.build(names, numels, [AFTER[i] for i in keep]),
    )


def sources(layout: Layout) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS * s.numel - 3, generator=draw) for s in layout.segments]


def call(ops: Any, name: str, before: Layout, after: Layout) -> tuple[torch.Tensor, Layout]:
    """One operator's result onto a poisoned output, and the layout that cuts it."""
    payload = torch.zeros(ROWS, before.nbytes, dtype=torch.uint8)
    reference.encode(before, sources(before), NOISE, payload)
    stack = torch.stack((payload, payload, payload))
    bytes_out = torch.full((ROWS, after.nbytes), 0xA5, dtype=torch.uint8)
    sums = torch.full((ROWS, before.coded_numel), 3.0)
    if name == "encode":
        bytes_out = torch.full_like(payload, 0xA5)
        ops.encode(before, sources(before), NOISE, bytes_out)
        return bytes_out, before
    if name == "decode_sum":
        ops.decode_sum(before, stack, sums)
        return sums, before
    if name == "reduce":
        out = torch.full((ROWS, before.numel), 3.0)
        ops.reduce(before, stack, out)
        return out, before
    if name == "encode_sums":
        ops.encode_sums(before, after, sums, NOISE, bytes_out)
    else:
        ops.decode_sum_encode(before, after, stack, NOISE, bytes_out)
    return bytes_out, after


def parts(name: str, result: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    cuts = {
        "decode_sum": lambda s: (s.coded_offset, s.coded_numel),
        "reduce": lambda s: (s.offset_numel, s.numel),
    }.get(name, lambda s: (s.offset, s.nbytes))
    return [result[:, a : a + n] for a, n in map(cuts, layout.segments)]


@pytest.mark.parametrize("outside_only", [True, False])
@pytest.mark.parametrize(
    "name", ["encode", "decode_sum", "reduce", "encode_sums", "decode_sum_encode"]
)
def test_outside_segments_in_any_place(name: str, outside_only: bool, kernels: list[str]) -> None:
    before, after = layouts(outside_only)
    got, layout = call(cuda, name, before, after)
    want, _ = call(reference, name, before, after)
    assert kernels == ([] if outside_only else [name])
    pairs = zip(parts(name, got, layout), parts(name, want, layout), strict=True)
    for segment, (mine, truth) in zip(layout.segments, pairs, strict=True):
        if isinstance(segment.codec, Outside):
            assert torch.equal(mine, truth), segment.name
        else:  # the kernels' place keeps what was there
            assert bool((mine == (0xA5 if mine.dtype == torch.uint8 else 3.0)).all())


@pytest.mark.parametrize("ok", [None, True, False])
@pytest.mark.parametrize("onto", [False, True])
def test_decode_and_finish(onto: bool, ok: bool | None, kernels: list[str]) -> None:
    before, _ = layouts(outside_only=False)
    payload, _ = call(reference, "encode", before, before)
    want, got = ([torch.full_like(s, 9.0) for s in sources(before)] for _ in range(2))
    chosen = None if ok is None else torch.tensor(ok)
    reference.decode(before, payload, want, onto, chosen)
    cuda.decode(before, payload, got, onto, chosen)
    assert all(torch.equal(w, torch.full_like(w, 9.0)) == (ok is False) for w in want)
    for segment, mine, truth in zip(before.segments, got, want, strict=True):
        outside = isinstance(segment.codec, Outside)
        assert torch.equal(mine, truth if outside else torch.full_like(truth, 9.0))
    sums = torch.randn(ROWS, before.coded_numel)
    assert torch.equal(cuda.finish_sums(before, sums), reference.finish_sums(before, sums))


@pytest.mark.parametrize("differences", [True, False])
def test_new_weights_of_outside_segments(differences: bool, kernels: list[str]) -> None:
    layout, _ = layouts(outside_only=False)
    masters = sources(layout)
    kept = [m.bfloat16() for m in masters]
    got, want = torch.full((2, ROWS, layout.nbytes), 0xA5, dtype=torch.uint8)
    cuda.encode_update(layout, masters, kept, differences, NOISE, got)
    reference.encode_update(layout, masters, kept, differences, NOISE, want)
    assert kernels == ["encode"]
    for segment in (s for s in layout.segments if isinstance(s.codec, Outside)):
        own = slice(segment.offset, segment.offset + segment.nbytes)
        assert torch.equal(got[:, own], want[:, own]), segment.name
    cuda.encode_update(Layout(()), [], [], differences, None, got[:, :0])


def test_an_update_is_one_call_each_way(kernels: list[str]) -> None:
    """Where all codecs are the kernels' own and nobody asks for errors."""
    count = 170
    layout = Layout.build([f"w{i}" for i in range(count)], [64] * count, [BlockCodec(4)] * count)
    x, m = ([torch.zeros(1, 64, dtype=d)] * count for d in (torch.float32, torch.bfloat16))
    out = torch.zeros(1, layout.nbytes, dtype=torch.uint8)
    for differences in (True, False):
        cuda.encode_update(layout, x, m, differences, None, out)
        cuda.decode(layout, out, m, differences, torch.tensor(True))
    assert kernels == ["encode_remembering", "decode"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", range(10))
def test_on_a_gpu_mixed_layouts_equal_the_reference(seed: int) -> None:
    case = cases.Case(seed, ROWS, 3, *layouts(outside_only=False))
    cases.check_case(case, ops)
