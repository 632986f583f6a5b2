"""The codec topk: what it keeps, its exact bytes, ties, faults, and settings that it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zpp_lab.codecs import (
    BlockCodec,
    Noise,
    SegmentNoise,
    TopKCodec,
    encode,
    noise_key,
)
from zpp_lab.config.codec import BLOCK_SIZES, CHUNK_SIZES, CodecConfig
from zpp_lab.config.model import LoraConfig
from zpp_lab.config.schema import RecipeConfig, RuleConfig, ShardingConfig

FP32, BF16 = torch.float32, torch.bfloat16


@st.composite
def codecs(draw: st.DrawFn, raw: bool | None = None) -> TopKCodec:
    size, dtype = draw(st.sampled_from(CHUNK_SIZES[:9])), draw(st.sampled_from([FP32, BF16]))
    if draw(st.booleans()) if raw is None else raw:
        return TopKCodec(dtype, draw(st.integers(1, size)), size)
    keep = draw(st.sampled_from([k for k in BLOCK_SIZES if k <= size]))
    return TopKCodec(
        dtype,
        keep,
        size,
        draw(st.sampled_from([2, 3, 4, 6, 8])),
        draw(st.booleans()),
        draw(st.sampled_from(["nearest", "stochastic"])),
        draw(st.sampled_from(["fp32", "bf16"])),
    )


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """bf16 or fp32 [R, n] of every magnitude, many of them equal, many of them 0."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(draw(st.integers(1, 3)), draw(st.integers(0, 1200)), generator=generator)
    kind = draw(st.sampled_from(["normal", "equal", "sparse", "heavy"]))
    if kind == "equal":
        x = x.round()
    elif kind == "sparse":
        x = x * (torch.rand(x.shape, generator=generator) < 0.02)
    elif kind == "heavy":
        x = x**5
    return (x * 10.0 ** draw(st.integers(-35, 30))).to(draw(st.sampled_from([FP32, BF16])))


def noise(count: int) -> SegmentNoise:
    ranks = tuple(range(count))
    return SegmentNoise(Noise(noise_key(1, 0, 0, "grads_intra"), ranks, ranks), 7)


def sent(codec: TopKCodec, x: Tensor) -> Tensor:
    return codec.decode(encode(codec, x, noise(len(x))), x.shape[1])


def greatest(row: list[float], codec: TopKCodec) -> set[int]:
    """Places that are to be kept, by Python's stable sort."""
    found: set[int] = set()
    for start in range(0, len(row), codec.block_size):
        places = range(start, min(start + codec.block_size, len(row)))
        keep = math.ceil(codec.keep * len(places) / codec.block_size)
        found |= set(sorted(places, key=lambda i: -abs(row[i]))[:keep])
    return found


@given(codecs(raw=True), rows())
@settings(max_examples=100, deadline=None)
def test_the_greatest_are_kept_as_they_are_and_others_are_0(codec: TopKCodec, x: Tensor) -> None:
    y = sent(codec, x)
    for mine, row in zip(y, x.float(), strict=True):
        kept = greatest(row.tolist(), codec)
        want = [float(row[i].to(codec.dtype)) if i in kept else 0.0 for i in range(len(row))]
        assert mine.tolist() == want


@given(codecs(raw=False), rows())
@settings(max_examples=100, deadline=None)
def test_values_in_bits_are_those_of_a_block_for_each_chunk(codec: TopKCodec, x: Tensor) -> None:
    """Noise counts the elements that are kept."""
    x, y = x.float(), sent(codec, x)
    assert codec.bits is not None
    block = BlockCodec(codec.bits, codec.keep, codec.symmetric, codec.rounding, codec.scale_dtype)
    kept = [sorted(greatest(row.tolist(), codec)) for row in x]
    values = torch.stack([row[places] for row, places in zip(x, kept, strict=True)])
    want = torch.zeros_like(x)
    coded = block.decode(encode(block, values, noise(len(x))), values.shape[1])
    for row, places, part in zip(want, kept, coded, strict=True):
        row[places] = part
    assert torch.equal(y, want)


@given(codecs(), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_byte_count_in_closed_form(codec: TopKCodec, numel: int) -> None:
    whole, rest = divmod(numel, codec.block_size)
    kept = whole * codec.keep + math.ceil(codec.keep * rest / codec.block_size)
    places, up = int(math.log2(codec.block_size)), lambda n: math.ceil(n / 16) * 16
    widths = [8] * (places // 8) + [w for w in (4, 2, 1) if places & w]
    assert sum(widths) == places
    expected = sum(up(math.ceil(kept * width / 8)) for width in widths)
    if codec.bits is None:
        expected += up(kept * codec.dtype.itemsize)
    else:
        expected += BlockCodec(
            codec.bits, codec.keep, codec.symmetric, scale_dtype=codec.scale_dtype
        ).nbytes(kept)
    assert codec.nbytes(numel) == expected


def test_bytes_by_hand() -> None:
    """Two of 16 and, of the last 5 elements, one: 4 bits each, then three bf16 numbers."""
    x = torch.zeros(1, 21)
    x[0, 3], x[0, 14], x[0, 19] = -2.0, 1.0, 0.5
    row = encode(TopKCodec(BF16, 2, 16), x)[0].tolist()
    assert row[:16] == [0xE3, 0x03] + [0] * 14
    assert row[16:] == [0x00, 0xC0, 0x80, 0x3F, 0x00, 0x3F] + [0] * 10


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([[1.0, -3.0, 3.0, -1.0] * 8])
    y = sent(TopKCodec(FP32, 3, 32), x)[0]
    assert y.nonzero().flatten().tolist() == [1, 2, 5]
    assert y[[1, 2, 5]].tolist() == [-3.0, 3.0, -3.0]
    assert encode(TopKCodec(FP32, 3, 32), torch.zeros(1, 32))[0].tolist()[:2] == [0x10, 0x02]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_chunk_with_a_nan_or_inf_is_nan_alone(bad: float, bits: int | None, dtype) -> None:  # type: ignore[no-untyped-def]
    codec = TopKCodec(dtype, 16, 32, bits)
    for place in (40, 99):  # 99 is in the last chunk of 4
        x = torch.arange(100.0)[None] + 1
        x[0, place] = bad
        start = place // 32 * 32
        y = sent(codec, x)[0]
        assert bool(y[start : start + 32].isnan().all())
        assert bool(torch.cat((y[:start], y[start + 32 :])).isfinite().all())


def test_faults_have_one_form() -> None:
    """Whatever NaN it was and wherever: so that devices, which make different ones, agree."""
    codec = TopKCodec(BF16, 2, 16)
    payloads = []
    for bits in (0x7FC00000, 0x7FFFFFFF, 0x7F800000, 0x7F800001):
        x = torch.ones(1, 16)
        x.view(torch.int32)[0, 11] = bits
        payloads.append(encode(codec, x)[0].tolist())
    assert payloads == [[0x10] + [0] * 15 + [0xC0, 0x7F, 0xC0, 0x7F] + [0] * 12] * 4


def test_what_leaves_the_range_of_raw_values_is_nan_and_never_inf() -> None:
    x = torch.full((1, 32), torch.finfo(FP32).max)
    x[0, 16:] = torch.finfo(BF16).max
    y = sent(TopKCodec(BF16, 2, 16), x)[0]
    assert bool(y[:16].isnan().all())
    assert y[16:18].tolist() == x[0, 16:18].tolist()
    assert torch.equal(sent(TopKCodec(FP32, 16, 16), x), x)
    wide = torch.tensor([[3e38, -3e38] * 8])
    assert bool(sent(TopKCodec(FP32, 16, 16, bits=8, symmetric=False), wide).isnan().all())


def test_denormals_are_compared_and_kept() -> None:
    x = torch.zeros(1, 16)
    x[0, 5], x[0, 9] = 1e-45, -3e-45
    y = sent(TopKCodec(FP32, 1, 16), x)[0]
    assert y.nonzero().flatten().tolist() == [9]
    assert y[9] == x[0, 9]


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"codec": "topk"}, "codec=topk needs keep"),
        ({"codec": "topk", "keep": 0}, "keep=0 of each block_size=256: use 1 to 256"),
        ({"codec": "topk", "keep": 65, "block_size": 64}, "use 1 to 64, or larger blocks"),
        ({"codec": "topk", "keep": 8, "block_size": 100}, "block_size=100: use a power of two"),
        ({"codec": "topk", "keep": 24, "bits": 4}, "keep=24 with bits=4: .* use a power of two"),
        ({"codec": "topk", "keep": 8, "hadamard": 64}, "set hadamard=0"),
        ({"codec": "topk", "keep": 8, "rounding": "stochastic"}, "with rounding, .* set bits"),
        ({"codec": "topk", "keep": 8, "symmetric": False}, "with symmetric, .* set bits"),
        ({"keep": 8}, "keep=8: .*codec=topk"),
    ],
)
def test_wrong_settings_name_the_fix(said: dict, fix: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=fix):
        RecipeConfig(grads=CodecConfig(**said))


SPARSE = CodecConfig(codec="topk", keep=8)


def test_weights_are_refused_unless_they_travel_as_differences() -> None:
    refused = r"weights_\w+: codec=topk .*recipe\.grads"
    for weights in ({"weights": SPARSE}, {"weights_backward": SPARSE}):
        with pytest.raises(ValueError, match=refused):
            RecipeConfig(**weights)
    with pytest.raises(ValueError, match=refused):
        RecipeConfig(rules=[RuleConfig(set=SPARSE)])
    kept = ShardingConfig(weights="node")
    with pytest.raises(ValueError, match=r"recipe\.weights_update"):
        RecipeConfig(sharding=kept, weights_update=SPARSE)
    RecipeConfig(sharding=ShardingConfig("node", update="differences"), weights_update=SPARSE)
    with pytest.raises(ValueError, match=r"base_codec\.codec=topk"):
        LoraConfig(rank=4, base_codec=SPARSE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@given(codecs(), rows(), st.sampled_from([None, math.nan, math.inf]))
@settings(max_examples=300, deadline=None)
def test_a_gpu_sends_the_same_bytes(codec: TopKCodec, x: Tensor, bad: float | None) -> None:
    if bad is not None and x.numel():
        x[-1, x.shape[1] // 2] = bad
    assert torch.equal(
        encode(codec, x.cuda(), noise(len(x))).cpu(), encode(codec, x, noise(len(x)))
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("size", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_a_gpu_sends_the_same_bytes_of_whole_chunks(size: int, dtype: torch.dtype) -> None:
    """Also of rows that do not lie side by side, and where a chunk is too large for the kernel."""
    x = torch.randn(2 * size + 5, 3, generator=torch.Generator().manual_seed(size)).to(dtype).t()
    codec = TopKCodec(dtype, size // 32, size)
    assert torch.equal(encode(codec, x.cuda()).cpu(), encode(codec, x))
