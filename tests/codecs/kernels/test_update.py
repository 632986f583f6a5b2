"""New weights for nodes that keep some: what is encoded of them, and what is kept then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.codecs.kernels.cases import hard_rows, same
from zpp_lab.codecs import BlockCodec, Noise, RawCodec, encode, kernels
from zpp_lab.codecs.base import Codec
from zpp_lab.codecs.kernels.table import update_settings
from zpp_lab.codecs.layout import Layout

FP32, BF16 = torch.float32, torch.bfloat16
FOUR, RAW = BlockCodec(4, 64), RawCodec(BF16)


def one(codec: Codec, numel: int) -> Layout:
    return Layout.build(["w"], [numel], [codec])


def sent(layout: Layout, x: Tensor, m: Tensor, differences: bool) -> Tensor:
    out = torch.full((len(x), layout.nbytes), 0xA5, dtype=torch.uint8)
    kernels.encode_update(layout, [x], [m], differences, None, out)
    return out


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["normal", "minus zeros", "denormal", "huge", "inf"])
def test_a_difference_is_rounded_once_each_way(kind: str, dtype: torch.dtype) -> None:
    """x - m in fp32 is encoded, m + d in fp32 kept, rounded to what m is."""
    layout = one(FOUR, 300)
    x, m = hard_rows(kind, 2, 300), hard_rows(kind, 2, 300, seed=1).to(dtype)
    payload = sent(layout, x, m, True)
    assert torch.equal(payload, encode(FOUR, x - m.float()))
    want = (m.float() + FOUR.decode(payload, 300)).to(dtype)
    kernels.decode(layout, payload, [m], True)
    same("kept", m, want)


def test_whole_weights_are_rounded_as_they_are_kept() -> None:
    x = hard_rows("normal", 2, 300)
    m = torch.zeros(2, 300, dtype=BF16)
    payload = sent(one(FOUR, 300), x, m, False)
    assert torch.equal(payload, encode(FOUR, x.to(BF16).float()))
    kernels.decode(one(FOUR, 300), payload, [m])
    assert torch.equal(m, FOUR.decode(payload, 300).to(BF16))


def test_raw_segments_have_no_difference() -> None:
    layout, x, m = one(RAW, 300), hard_rows("normal", 2, 300), torch.ones(2, 300, dtype=BF16)
    payload = sent(layout, x, m, True)
    assert torch.equal(payload, encode(RAW, x))
    kernels.decode(layout, payload, [m], True)
    assert torch.equal(m, x.to(BF16))


@pytest.mark.parametrize("differences", [True, False])
@pytest.mark.parametrize("codec", [FOUR, RAW])
def test_nothing_is_kept_where_it_is_not_ok(codec: Codec, differences: bool) -> None:
    layout, x, before = one(codec, 300), hard_rows("nan", 2, 300), torch.ones(2, 300, dtype=BF16)
    payload = sent(layout, x, before, differences)
    kept, new = before.clone(), before.clone()
    kernels.decode(layout, payload, [kept], differences, torch.tensor(False))
    assert torch.equal(kept, before)
    kernels.decode(layout, payload, [kept], differences, torch.tensor(True))
    kernels.decode(layout, payload, [new], differences)
    same("kept", kept, new)


def test_what_lies_past_the_end_of_both_is_zero() -> None:
    """Whole parameters that end inside the last row, as the virtual engine has them."""
    layout, noise = one(BlockCodec(4, 64, rounding="stochastic"), 300), Noise(7, (0, 1), (0, 1))
    x, m = hard_rows("normal", 1, 500)[0], hard_rows("normal", 1, 500, seed=1)[0]
    rows = [torch.nn.functional.pad(t, (0, 100)).view(2, 300) for t in (x, m)]
    short, whole = (torch.zeros(2, layout.nbytes, dtype=torch.uint8) for _ in "ab")
    kernels.encode_update(layout, [x], [m], True, noise, short)
    kernels.encode_update(layout, rows[:1], rows[1:], True, noise, whole)
    assert torch.equal(short, whole)


@pytest.mark.parametrize(
    ("dtype", "differences", "rows"),
    [(BF16, True, [2, 0, 0]), (FP32, True, [1, 0, 0]), (BF16, False, [4, 0, 4])],
)
def test_settings_of_the_kernel(dtype: torch.dtype, differences: bool, rows: list[int]) -> None:
    """Of a codec, of raw bytes in bf16, and in fp32."""
    layout = Layout.build(["a", "b", "c"], [64] * 3, [FOUR, RAW, RawCodec(FP32)])
    made = update_settings(layout, dtype, differences)
    assert made is not None
    assert made[:, 0].tolist() == rows
    assert update_settings(layout, dtype, differences) is made
    assert update_settings(layout, FP32, False) is None
