"""The codec sketch, TAGC's wire: where its sums are exact, its bytes, and what goes wrong in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zpp_lab.codecs import SketchCodec, build_codec, encode
from zpp_lab.codecs.families.sketch import STEPS, murmur3
from zpp_lab.codecs.packing import unpack
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.schema import RecipeConfig

ONE_BIT, FOUR_BITS = SketchCodec(64), SketchCodec(64, index_bits=4)
N = 2**17  # 2048 blocks, where TAGC has 1152


def kept_by(ranks: int, apart: bool = False) -> Tensor:
    """fp32 [ranks, 1, N], of each rank nearly a fifth not 0: what TAGC is set to keep. `apart`: of
    two ranks, each its own, and together as many as of two that choose by themselves."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ranks, 1, N, generator=draw) * 1e-3
    where = torch.rand(1 if apart else ranks, 1, N, generator=draw)
    share = 0.18 if apart else 0.198
    least = torch.arange(ranks).view(-1, 1, 1) * share if apart else 0.0
    return torch.where((where >= least) & (where < least + share), x, 0.0)


def error(codec: SketchCodec, x: Tensor) -> float:
    """Of the sum of all ranks' rows: squared, over that of the true sum."""
    y = codec.decode_sum(torch.stack([encode(codec, row) for row in x]), x.shape[-1])
    return float((y - x.sum(0)).square().sum() / x.sum(0).square().sum())


def wrong_bits(codec: SketchCodec, x: Tensor) -> float:
    """Share of elements of which the added index says other than that some rank keeps them."""
    rows = torch.stack([encode(codec, row) for row in x])
    index = codec.decode_sum(rows, N, rotated=True)[:, sum(codec.rotation.widths(N)[:2]) :]
    bits = unpack((index.long() & 255).to(torch.uint8), N, codec.index_bits) != 0
    return float((bits != (x != 0).any(0)).float().mean())


def test_hashes_are_murmur3() -> None:
    """By vectors that are published with it."""
    assert [murmur3(0, 0), murmur3(0x87654321, 0)] == [0x2362F9DE, 0xF55B516B]


def test_it_takes_the_bytes_that_tagc_moves_and_more_than_bf16() -> None:
    """Its defaults: a sketch of half the elements in fp32, and an index that is all-reduced."""
    assert SketchCodec(1024).nbytes(2**20) / 2**20 == 2.25
    assert SketchCodec(1024, index_bits=4).nbytes(2**20) / 2**20 == 3.0
    row = torch.randn(1, 3 * 64 + 36)
    assert ONE_BIT.nbytes(228) == 2 * 64 * 4 + 36 * 4 + 2 * 32
    assert torch.equal(ONE_BIT.decode(encode(ONE_BIT, row), 228)[:, 192:], row[:, 192:])


def test_what_one_rank_sends_comes_back_but_for_last_bits() -> None:
    x = kept_by(1)
    assert error(ONE_BIT, x) < 1e-13
    assert wrong_bits(ONE_BIT, x) == 0


def test_two_ranks_add_up_exactly_where_no_element_is_kept_by_both() -> None:
    """The claim of a lossless sum, at the published settings."""
    x = kept_by(2, apart=True)
    assert error(ONE_BIT, x) < 1e-11
    assert wrong_bits(ONE_BIT, x) == 0


def test_ones_of_two_ranks_carry_into_the_next_element() -> None:
    """Ranks that choose by themselves share a twenty-fifth of all elements. The bit of each is lost
    and often another one set; by then the sketch is read wrong. Four bits keep sums exact."""
    x = kept_by(2)
    assert 0.07 < wrong_bits(ONE_BIT, x) < 0.09
    assert error(ONE_BIT, x) > 0.5
    assert wrong_bits(FOUR_BITS, x) == 0
    assert error(FOUR_BITS, x) < 1e-11


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_three_ranks_fill_the_sketch_beyond_what_peels(ranks: int) -> None:
    """1 - 0.8³ of all elements are kept by some rank, in half as many places: 0.98 each."""
    x = kept_by(ranks)
    for codec in (ONE_BIT, FOUR_BITS):
        assert error(codec, x) > 0.5
    assert wrong_bits(ONE_BIT, x) > 0.1
    larger = SketchCodec(64, ratio=1.01, index_bits=4)
    assert (error(larger, x) < 1e-9) == (1 - 0.8**ranks < 0.8)


def test_its_thresholds_keep_more_than_it_is_set_to() -> None:
    """A table of 25 steps, of which the one below is taken; so two ranks are too many as well."""
    x = torch.randn(2, 1, N, generator=torch.Generator().manual_seed(1)) * 1e-3
    kept = torch.stack([ONE_BIT.kept(row) for row in x])
    assert {float(row[row != 0].abs().min().log10().floor()) for row in kept} == {-3.0}
    assert 0.31 < float((kept != 0).float().mean()) < 0.33
    assert float(kept[kept != 0].abs().min()) >= STEPS[STEPS.index(1e-3)]
    assert error(FOUR_BITS, kept) > 0.5
    assert torch.equal(ONE_BIT.sent(x[0]), kept[0])  # what a memory takes for sent


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_of_one_rank_is_seen_by_all(bad: float) -> None:
    x = kept_by(2)
    x[1, 0, 5] = bad
    assert error(ONE_BIT, x) != error(ONE_BIT, x)


def test_wrong_settings_name_the_fix() -> None:
    sketch = CodecConfig(codec="sketch", options={"ratio": 3})
    assert build_codec(sketch, torch.float32) == SketchCodec(ratio=3)
    for said, fix in (
        ({"block_size": 100}, "block_size=100: use a power of two"),
        ({"options": {"sparsity": 1}}, "sparsity=1: use 0 or more, and less than 1"),
        ({"options": {"ratio": 1}}, "ratio=1: use more than 1"),
        ({"options": {"index_bits": 8}}, "index_bits=8: use 1 or 4"),
        ({"bits": 4}, "codec sketch .*'bits'"),
    ):
        with pytest.raises(ValueError, match=fix):
            build_codec(CodecConfig(codec="sketch", **said), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"recipe\.hops=1"):
        RecipeConfig(hops=2, grads=sketch)
    with pytest.raises(ValueError, match="codec=sketch"):
        RecipeConfig(weights=sketch)
