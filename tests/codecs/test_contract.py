"""The codecs' test table: every codec is a row, and broken ones are found out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from zpp_lab.codecs import (
    BlockCodec,
    Codec,
    CodecBase,
    Float8Codec,
    NormalCodec,
    RawCodec,
    ShamCodec,
    SignCodec,
    TopKCodec,
)
from zpp_lab.codecs.contract import check_codec

TABLE: list[Codec] = [
    RawCodec(torch.float32),
    RawCodec(torch.bfloat16),
    BlockCodec(8),
    BlockCodec(6, 64, symmetric=False),
    BlockCodec(4, 64, rounding="stochastic"),
    BlockCodec(3, 32),
    BlockCodec(3, 64, symmetric=False, rounding="stochastic", hadamard=16),
    BlockCodec(2, 32, symmetric=False, scale_dtype="bf16"),
    BlockCodec(4, 64, hadamard=32),
    BlockCodec(8, 256, rounding="stochastic", hadamard=64, random_signs=True),
    NormalCodec(4),
    NormalCodec(3, 32, scale_dtype="bf16"),
    NormalCodec(2, 64, hadamard=32, random_signs=True),
    Float8Codec("e4m3"),
    Float8Codec("e5m2"),
    SignCodec(),
    SignCodec(16),
    ShamCodec(torch.float32, BlockCodec(4)),
    ShamCodec(torch.bfloat16, BlockCodec(2, 32, symmetric=False, hadamard=16)),
    TopKCodec(torch.float32, 3, 16),
    TopKCodec(torch.bfloat16, 32, 1024),
    TopKCodec(torch.float32, 16, 64, bits=8),
    TopKCodec(torch.bfloat16, 16, 256, 2, symmetric=False, rounding="stochastic"),
]


@pytest.mark.parametrize("codec", TABLE, ids=str)
def test_codec_keeps_the_contract(codec: Codec) -> None:
    check_codec(codec)


@dataclass(frozen=True)
class Sloppy(CodecBase):
    """Halves as they are, with one fault that the test names."""

    fault: str

    def nbytes(self, numel: int) -> int:
        return 2 * numel if self.fault == "multiple of 16" else -(-2 * numel // 16) * 16

    def encode(self, x: Tensor, noise: object, out: Tensor, *, rotated: bool = False) -> None:
        if self.fault == "depend on other rows":
            x = x - x.mean(0, keepdim=True)
        if self.fault == "nan decodes to":
            x = x.nan_to_num()
        own = x.to(torch.float16).contiguous().view(torch.uint8)
        if self.fault != "unwritten":
            out.zero_()
        out[:, : own.shape[1]] = own

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        values = payload[:, : 2 * numel].contiguous().view(torch.float16)
        return values if self.fault == "not float32" else values.float()


def test_a_sound_one_passes() -> None:
    check_codec(Sloppy("none"))


@pytest.mark.parametrize(
    "fault",
    ["multiple of 16", "unwritten", "depend on other rows", "not float32", "nan decodes to"],
)
def test_a_broken_codec_is_named(fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        check_codec(Sloppy(fault))
