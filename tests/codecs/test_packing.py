"""The byte format, written out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.codecs import BlockCodec, encode
from zpp_lab.codecs.packing import pack, packed_bytes, unpack


@given(st.integers(1, 16), st.integers(1, 200), st.integers(0, 2**31))
def test_pack_and_unpack(bits: int, numel: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, numel), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32)
    out = torch.full((3, packed_bytes(numel, bits)), 255, dtype=torch.uint8)
    pack(codes, bits, out)
    assert torch.equal(unpack(out, numel, bits), codes)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (2, [0b11_10_01_00, 0b00_00_00_01] + [0] * 14),
        (4, [0x10, 0x32, 0x05] + [0] * 13),
        (8, [0, 1, 2, 3, 5] + [0] * 11),
        # 3 bits: the low pairs, then the high bits
        (3, [0b11_10_01_00, 0b00_00_00_01] + [0] * 14 + [0b0001_0000] + [0] * 15),
        # 6 bits: the low nibbles, then the high pairs
        (6, [0x10, 0x32, 0x05] + [0] * 13 + [0, 0] + [0] * 14),
    ],
)
def test_planes_by_hand(bits: int, expected: list[int]) -> None:
    codes = torch.tensor([[0, 1, 2, 3, 5 if bits > 2 else 1]], dtype=torch.uint8)
    out = torch.empty(1, packed_bytes(5, bits), dtype=torch.uint8)
    pack(codes, bits, out)
    assert out[0].tolist() == expected


def test_a_whole_row_by_hand() -> None:
    """4 bits, one block of 16: codes q + 8, then the fp32 scale, then zeros."""
    x = torch.tensor([[7.0, -7.0, 0.0, 3.4] + [0.0] * 12])
    row = encode(BlockCodec(bits=4, block_size=16), x)[0]
    assert row[:8].tolist() == [0x1F, 0xB8, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88]
    assert row[8:16].tolist() == [0] * 8
    assert row[16:20].view(torch.float32).item() == 1.0
    assert row[20:].tolist() == [0] * 12
