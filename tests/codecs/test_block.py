"""The block codec's contract: error bounds, exact bytes, hard inputs, unbiased rounding."""

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
    SignCodec,
    encode,
    noise_key,
    parameter_id,
)
from zpp_lab.config.codec import BLOCK_SIZES

TINY = 2.0**-126


@st.composite
def codecs(draw: st.DrawFn, rotate: bool = True) -> BlockCodec:
    block = draw(st.sampled_from(BLOCK_SIZES))
    widths = [h for h in (16, 32, 64, 128, 256) if h <= block] if rotate else []
    hadamard = draw(st.sampled_from([0, *widths]))
    return BlockCodec(
        bits=draw(st.sampled_from([2, 3, 4, 6, 8])),
        block_size=block,
        symmetric=draw(st.booleans()),
        rounding=draw(st.sampled_from(["nearest", "stochastic"])),
        scale_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        hadamard=hadamard,
        random_signs=bool(hadamard) and draw(st.booleans()),
    )


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    shape = (draw(st.integers(1, 4)), draw(st.integers(0, 700)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = 10.0 ** draw(st.integers(-30, 30))
    kind = draw(st.sampled_from(["normal", "heavy", "offset", "sparse"]))
    x = torch.randn(shape, generator=generator)
    if kind == "heavy":
        x = x**5
    elif kind == "offset":
        x = x + 100.0
    elif kind == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.02)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return (x * scale).to(dtype)


def noise(count: int, rank: int = 0, step: int = 0) -> SegmentNoise:
    key = noise_key(1, step, 0, "grads_intra")
    return SegmentNoise(Noise(key, (rank,) * count, tuple(range(count))), parameter_id("w"))


def stored_scales(codec: BlockCodec, payload: Tensor, numel: int) -> Tensor:
    """fp32 [R, coded_numel]: each element's scale as the payload holds it."""
    from zpp_lab.codecs.packing import packed_bytes

    if not numel:
        return torch.zeros(payload.shape[0], 0)
    split = packed_bytes(codec.coded_numel(numel), codec.bits)
    scale, _ = codec._read_scales(payload[:, split:], codec.nblocks(numel))
    return scale.expand(-1, -1, codec.block_size).flatten(1)[:, : codec.coded_numel(numel)]


@given(codecs(rotate=False), rows())
@settings(max_examples=150, deadline=None)
def test_error_is_within_half_a_step_or_a_whole_one(codec: BlockCodec, x: Tensor) -> None:
    payload = encode(codec, x, noise(x.shape[0]))
    y = codec.decode(payload, x.shape[1])
    bound = stored_scales(codec, payload, x.shape[1]).double()
    if codec.rounding == "nearest":
        bound = bound / 2
    # one rounding each of 1/s, of y, of q s and of + z, relative to the block's largest value
    slack = 1e-6 * (bound * 2 * codec.levels + x.double().abs())
    if codec.scale_dtype == "bf16":  # a scale rounded down clips the end by up to 2^-9 of it
        slack = slack + bound * 2 * codec.levels * 2.0**-8
    assert bool(((y.double() - x.double()).abs() <= bound + slack).all())


@given(codecs(), rows())
@settings(max_examples=100, deadline=None)
def test_rotated_error_is_bounded_in_norm(codec: BlockCodec, x: Tensor) -> None:
    payload = encode(codec, x, noise(x.shape[0]))
    y = codec.decode(payload, x.shape[1]).double()
    steps = stored_scales(codec, payload, x.shape[1]).double()
    error = (y - x.double()).norm(dim=1)
    bound = steps.norm(dim=1) * (1.01 + codec.levels * 2.0**-7)
    assert bool((error <= bound + 1e-5 * x.double().norm(dim=1)).all())


@given(codecs(), rows())
@settings(max_examples=100, deadline=None)
def test_encode_is_deterministic_and_rows_are_independent(codec: BlockCodec, x: Tensor) -> None:
    whole = encode(codec, x, noise(x.shape[0]))
    assert torch.equal(whole, encode(codec, x, noise(x.shape[0])))
    last = x.shape[0] - 1
    alone = SegmentNoise(Noise(noise(1).noise.key, (0,), (last,)), parameter_id("w"))
    assert torch.equal(whole[last:], encode(codec, x[last:], alone))


@given(codecs(), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_byte_count_in_closed_form(codec: BlockCodec, numel: int) -> None:
    coded = math.ceil(numel / codec.hadamard) * codec.hadamard if codec.hadamard else numel
    planes = {2: [2], 3: [2, 1], 4: [4], 6: [4, 2], 8: [8]}[codec.bits]
    up = lambda n: math.ceil(n / 16) * 16  # noqa: E731
    scale = (4 if codec.scale_dtype == "fp32" else 2) * (1 if codec.symmetric else 2)
    expected = sum(up(math.ceil(coded * w / 8)) for w in planes)
    expected += up(math.ceil(coded / codec.block_size) * scale)
    assert codec.nbytes(numel) == expected
    payload = torch.full((2, expected), 255, dtype=torch.uint8)
    codec.encode(torch.ones(2, numel), noise(2), payload)
    again = torch.zeros((2, expected), dtype=torch.uint8)
    codec.encode(torch.ones(2, numel), noise(2), again)
    assert torch.equal(payload, again), "every byte is written"


@given(codecs(), rows(), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_decode_sum_is_decode_then_sum(codec: BlockCodec, x: Tensor, k: int) -> None:
    payloads = torch.stack(
        [encode(codec, x * (i + 1), noise(x.shape[0], rank=i)) for i in range(k)]
    )
    total = torch.zeros(x.shape, dtype=torch.float32)
    for payload in payloads:
        total = total + codec.decode(payload, x.shape[1])
    fused = codec.decode_sum(payloads, x.shape[1])
    if codec.rotation is None:
        assert torch.equal(fused, total)
    else:  # one inverse after the sum instead of one each
        scale = float(x.float().abs().max()) * k * k if x.numel() else 0.0
        torch.testing.assert_close(fused, total, rtol=1e-4, atol=1e-5 * scale + 1e-30)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_stochastic_rounding_is_unbiased(bits: int, symmetric: bool) -> None:
    codec = BlockCodec(bits=bits, block_size=64, symmetric=symmetric, rounding="stochastic")
    x = torch.linspace(-1.0, 1.0, 64)[None] * 0.7
    ranks = tuple(range(40))
    draws = []
    for step in range(50):
        key = noise_key(1, step, 0, "grads_intra")
        drawn = SegmentNoise(Noise(key, ranks, (0,) * len(ranks)), parameter_id("w"))
        draws.append(codec.decode(encode(codec, x.expand(len(ranks), -1), drawn), 64))
    found = torch.cat(draws)[:, None].double()
    n, size = found.shape[0], 1.4 / (2**bits - 1) if not symmetric else 0.7 / codec.levels
    # each draw lies within one step, so its mean has deviation at most step / 2 / sqrt(n)
    deviation = (found.mean(0) - x.double()).abs().max()
    assert float(deviation) < 5.0 * size / 2 / math.sqrt(n)
    assert float((found.mean(0) - x.double()).mean().abs()) < 5.0 * size / 2 / math.sqrt(64 * n)


def test_philox_known_answer() -> None:
    """Philox4x32-7 of Random123's known-answer table: counter and key all zero, then all ones."""
    from zpp_lab.codecs.noise import philox

    zero = torch.zeros(1, dtype=torch.int64)
    words = philox((zero, zero, zero, zero), 0)
    assert [f"{int(w):08x}" for w in words] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    ones = torch.full((1,), 0xFFFFFFFF, dtype=torch.int64)
    words = philox((ones, ones, ones, ones), 2**64 - 1)
    assert [f"{int(w):08x}" for w in words] == ["5207ddc2", "45165e59", "4d8ee751", "8c52f662"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("hadamard", [0, 16])
def test_non_finite_blocks_decode_to_nan_alone(bad, symmetric, scale_dtype, hadamard) -> None:
    codec = BlockCodec(
        bits=4, block_size=16, symmetric=symmetric, scale_dtype=scale_dtype, hadamard=hadamard
    )
    x = torch.arange(48, dtype=torch.float32)[None] + 1
    x[0, 20] = bad
    y = codec.decode(encode(codec, x), 48)
    assert bool(y[0, 16:32].isnan().all())
    assert bool(torch.cat((y[0, :16], y[0, 32:])).isfinite().all())


def test_one_nan_is_stored() -> None:
    x = torch.full((1, 16), math.nan)
    fp32 = encode(BlockCodec(bits=8, block_size=16), x)[0, 16:20]
    bf16 = encode(BlockCodec(bits=8, block_size=16, symmetric=False, scale_dtype="bf16"), x)[0]
    assert fp32.tolist() == [0, 0, 0xC0, 0x7F]
    assert bf16[16:20].tolist() == [0xC0, 0x7F, 0, 0]


def test_overflowing_range_is_not_hidden() -> None:
    x = torch.tensor([[3e38, -3e38] * 8])
    codec = BlockCodec(bits=8, block_size=16, symmetric=False)
    assert bool(codec.decode(encode(codec, x), 16).isnan().all())
    codec = BlockCodec(bits=8, block_size=16)
    torch.testing.assert_close(codec.decode(encode(codec, x), 16), x)


@st.composite
def extreme_rows(draw: st.DrawFn) -> Tensor:
    """Finite fp32 [R, n] whose largest numbers are fp32's, or as near as `below` powers of two."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 700)))
    x = torch.rand(shape, generator=generator)
    kind = draw(st.sampled_from(["any", "positive", "narrow", "ends", "alone"]))
    if kind == "any":
        x = 2 * x - 1
    elif kind == "narrow":
        x = 1 - x * 2.0 ** -draw(st.integers(1, 24))
    elif kind == "ends":
        x = x.round() * draw(st.sampled_from([-1.0, 1.0]))
    elif kind == "alone":
        x = (x < 0.01).float()
    top = torch.finfo(torch.float32).max
    return (x * top).clamp(-top, top) * 2.0 ** -draw(st.integers(0, 14))


@given(codecs(), extreme_rows())
@settings(max_examples=400, deadline=None)
def test_finite_blocks_decode_to_finite_values_or_whole_to_nan(codec, x) -> None:  # type: ignore[no-untyped-def]
    """Never to Inf; and to finite values up to the number that block.py names."""
    numel = x.shape[1]
    y = codec.decode(encode(codec, x, noise(x.shape[0])), numel)
    assert not bool(y.isinf().any())
    fill = (0, -numel % codec.block_size)
    blocks = torch.nn.functional.pad(x, fill).view(-1, codec.block_size)
    nan = torch.nn.functional.pad(y.isnan(), fill, value=False).view(-1, codec.block_size)
    there = torch.nn.functional.pad(torch.ones_like(x), fill).view(-1, codec.block_size) > 0
    assert torch.equal(nan, nan[:, :1] & there)
    promised = 2.0**126 / max(1, codec.hadamard) ** 1.5
    assert not bool(nan[blocks.abs().amax(1) <= promised].any())


@given(codecs(), st.sampled_from([0, 1, 2, 15, 16, 17, 255, 257]))
@settings(max_examples=80, deadline=None)
def test_zeros_and_denormals_stay_small(codec: BlockCodec, numel: int) -> None:
    zeros = torch.zeros(2, numel)
    assert torch.equal(codec.decode(encode(codec, zeros, noise(2)), numel), zeros)
    tiny = torch.full((2, numel), 1e-40)
    y = codec.decode(encode(codec, tiny, noise(2)), numel)
    assert bool((y.abs() <= 40 * TINY).all())


def test_constant_blocks_are_exact_when_asymmetric() -> None:
    codec = BlockCodec(bits=2, block_size=32, symmetric=False)
    x = torch.full((1, 40), 0.3)
    assert torch.equal(codec.decode(encode(codec, x), 40), x)


@pytest.mark.parametrize(
    ("settings_", "fix"),
    [
        ({"bits": 5}, "bits=5"),
        ({"block_size": 100}, "power of two"),
        ({"block_size": 16384}, "power of two"),
        ({"hadamard": 48}, "hadamard=48"),
        ({"hadamard": 256, "block_size": 64}, "at least as wide"),
        ({"random_signs": True}, "needs hadamard"),
        ({"rounding": "up"}, "nearest or stochastic"),
        ({"scale_dtype": "fp8"}, "fp32 or bf16"),
    ],
)
def test_wrong_settings_name_the_fix(settings_: dict, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        BlockCodec(**settings_)


def test_signs_keep_the_mean_magnitude_of_each_block() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, -0.0] * 4 + [-5.0, 7.0]])
    codec = SignCodec(16)
    want = [1.5, -1.5, 1.5, 1.5] * 4 + [-6.0, 6.0]  # the last block has two elements
    payload = encode(codec, x)
    assert codec.nbytes(18) == payload.shape[1] == 16 + 16
    assert codec.decode(payload, 18).tolist() == [want]
    assert payload[0, :3].tolist() == [0b11011101, 0b11011101, 0b10]
    huge = torch.full((1, 16), torch.finfo(torch.float32).max)
    assert torch.equal(codec.decode(encode(codec, huge), 16), huge), "the mean overflows nowhere"
