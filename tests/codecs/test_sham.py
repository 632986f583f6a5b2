"""The sham control: a codec's error in size, but with mean 0, and in the bytes of no codec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zpp_lab.codecs import (
    BlockCodec,
    Noise,
    RawCodec,
    SegmentNoise,
    ShamCodec,
    build_codec,
    encode,
    noise_key,
)
from zpp_lab.config.codec import CodecConfig

SPECS = [
    BlockCodec(4),
    BlockCodec(8, 64, symmetric=False),
    BlockCodec(2, 32),
    BlockCodec(2, 64, symmetric=False, scale_dtype="bf16"),
    BlockCodec(4, 2048, hadamard=64),
]


def noise(rows: int, step: int = 0) -> SegmentNoise:
    key = noise_key(1, step, 0, "weights_forward")
    return SegmentNoise(Noise(key, tuple(range(rows)), tuple(range(rows))), 7)


def values(rows: int, numel: int) -> Tensor:
    """fp32 [rows, numel]: blocks of very different sizes, some with outliers."""
    draw = torch.Generator().manual_seed(numel)
    x = torch.randn(rows, numel, generator=draw) ** 3
    return (
        x
        * torch.exp(3 * torch.randn(rows, -(-numel // 100), generator=draw)).repeat_interleave(
            100, 1
        )[:, :numel]
    )


def error_of(sham: ShamCodec, x: Tensor, step: int = 0) -> Tensor:
    sent = encode(sham, x, noise(len(x), step))
    return sham.decode(sent, x.shape[1]).double() - x.double()


@pytest.mark.parametrize("codec", SPECS, ids=str)
def test_each_block_has_the_codecs_error_in_size_and_mean_zero(codec: BlockCodec) -> None:
    x, steps = values(2, 4200), 200  # the last block is not whole
    errors = torch.stack([error_of(ShamCodec(torch.float32, codec), x, s) for s in range(steps)])
    theirs = codec.decode(encode(codec, x), x.shape[1]).double() - x.double()
    for mine, want in zip(
        errors.split(codec.block_size, 2), theirs.split(codec.block_size, 1), strict=True
    ):
        count = mine[:, 0].numel()
        ratio = mine.square().mean((0, 2)) / want.square().mean(1)
        # squares of uniform numbers deviate by sqrt(0.8) of their mean
        assert bool(((ratio - 1).abs() < 5 * (0.8 / count) ** 0.5 + 1e-4).all())
        size = want.square().mean(1).sqrt()
        assert bool((mine.mean((0, 2)).abs() < 5 * size / count**0.5 + 1e-6 * size).all())
        assert bool((mine.mean(0).abs() < 6 * size[:, None] / steps**0.5).all())


def test_its_bytes_are_those_of_no_codec() -> None:
    settings = CodecConfig(codec="sham", bits=4, block_size=64)
    for dtype in (torch.bfloat16, torch.float32):
        made = build_codec(settings, dtype)
        assert made == ShamCodec(dtype, BlockCodec(4, 64))
        assert [made.nbytes(n) for n in range(50)] == [RawCodec(dtype).nbytes(n) for n in range(50)]


def test_what_the_codec_gets_right_stays_and_what_it_cannot_send_is_nan() -> None:
    sham = ShamCodec(torch.float32, BlockCodec(4, 16))
    x = torch.zeros(1, 64)
    x[0, 16:32] = 7.0
    x[0, 32:48] = 1e38 * torch.linspace(-1, 1, 16)
    x[0, 40] = torch.inf
    x[0, 48:] = torch.finfo(torch.float32).max * torch.linspace(0.9, 1, 16)
    y = sham.decode(encode(sham, x, noise(1)), 64)
    assert torch.equal(y[0, :32], x[0, :32])
    assert bool(y[0, 32:48].isnan().all())
    assert not bool(y.isinf().any())


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({}, "codec=sham .*bits"),
        ({"bits": 4, "rounding": "stochastic"}, "leave rounding out"),
        ({"bits": 4, "block_size": 100}, "block_size=100: use a power of two"),
        ({"bits": 4, "options": {"colour": 1}}, "codec sham .*'colour'"),
    ],
)
def test_wrong_settings_name_the_fix(settings: dict, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        build_codec(CodecConfig(codec="sham", **settings), torch.float32)
