"""Levels for normal numbers: the published ones, the nearest of them, and what they save."""

from __future__ import annotations

import re
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.codecs import BlockCodec, Codec, NormalCodec, encode
from zpp_lab.codecs.families.normal import levels_of
from zpp_lab.config.codec import BLOCK_SIZES
from zpp_lab.files import cuda_dir

PUBLISHED = {  # Max 1960, table I: the positive levels for a normal number of variance 1
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


def nmse(codec: Codec, x: torch.Tensor) -> float:
    error = codec.decode(encode(codec, x), x.shape[1]) - x
    return float(error.square().sum() / x.square().sum())


@pytest.mark.parametrize("bits", PUBLISHED)
def test_levels_of_large_blocks_are_those_that_max_published(bits: int) -> None:
    largest = NormalDist().inv_cdf((1 + 0.5 ** (1 / 8192)) / 2)  # its median
    own = [level * largest for level in levels_of(bits, 8192)]
    assert own[2 ** (bits - 1) :] == pytest.approx(PUBLISHED[bits], rel=0.01)


def test_kernels_have_the_same_levels() -> None:
    text = (cuda_dir() / "codec" / "normal.cuh").read_text()
    written = [float.fromhex(x) for x in re.findall(r"(0x1\.[0-9a-f]+p-\d+)f", text)]
    positive = [levels_of(bits, n)[2 ** (bits - 1) :] for n in BLOCK_SIZES for bits in (2, 3, 4)]
    assert written == [level for levels in positive for level in levels]


@pytest.mark.parametrize("bits", PUBLISHED)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_levels_rise_and_are_even_and_within_the_scale(bits: int, block_size: int) -> None:
    levels = levels_of(bits, block_size)
    assert list(levels) == sorted({*levels}) == [-x for x in reversed(levels)]
    assert len(levels) == 2**bits
    assert levels[-1] < 1


@given(
    st.sampled_from([2, 3, 4]),
    st.sampled_from(BLOCK_SIZES[:5]),
    st.integers(1, 600),
    st.integers(-30, 30),
    st.sampled_from(["fp32", "bf16"]),
)
def test_each_element_becomes_its_nearest_level(
    bits: int, block_size: int, numel: int, exponent: int, scale_dtype: str
) -> None:
    codec = NormalCodec(bits, block_size, scale_dtype=scale_dtype)
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel)) * 10.0**exponent
    payload = encode(codec, x)
    _, scale, _ = codec.levels_and_scales(payload, numel)
    each = scale.flatten(1).repeat_interleave(block_size, 1)[:, :numel, None]
    levels = torch.tensor(levels_of(bits, block_size)) * each
    least = (levels - x[..., None]).abs().amin(-1)
    found = (codec.decode(payload, numel) - x).abs()
    assert torch.allclose(found, least, rtol=1e-4, atol=float(1e-6 * x.abs().max()))
    assert payload.shape == encode(BlockCodec(bits, block_size, scale_dtype=scale_dtype), x).shape


def test_zeros_decode_to_next_to_nothing() -> None:
    codec = NormalCodec(2, 16)
    assert codec.decode(encode(codec, torch.zeros(1, 40)), 40).abs().max() < 2.0**-126


@pytest.mark.parametrize(("bits", "share"), [(2, 0.2), (3, 0.45), (4, 0.6)])
def test_normal_numbers_lose_less_than_on_even_levels_of_as_many_bytes(
    bits: int, share: float
) -> None:
    x = torch.randn(16, 2**14, generator=torch.Generator().manual_seed(1))
    normal, even = NormalCodec(bits, 128, scale_dtype="bf16"), BlockCodec(bits, 256)
    assert normal.nbytes(2**14) == even.nbytes(2**14)
    assert nmse(normal, x) < share * nmse(even, x)


def test_after_a_rotation_spikes_lose_less() -> None:
    x = torch.randn(16, 2**12, generator=torch.Generator().manual_seed(1)) ** 5
    assert nmse(NormalCodec(2, hadamard=64), x) < 0.7 * nmse(NormalCodec(2), x)


def test_the_ends_are_counted() -> None:
    codec = NormalCodec(2, 16)
    x = torch.tensor([[-1.0, 1.0, 0.1, -0.1] * 4])
    assert codec.saturated(encode(codec, x), 16).tolist() == [0.5]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bits": 6}, "use 2, 3 or 4"),
        ({"symmetric": False}, "set symmetric=true"),
        ({"rounding": "stochastic"}, "set rounding=nearest"),
        ({"block_size": 48}, "use a power of two"),
    ],
)
def test_what_it_does_not_have(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        NormalCodec(**{"bits": 4, **settings})  # type: ignore[arg-type]
