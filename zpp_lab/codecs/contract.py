"""What every codec must keep, as one check for our codecs and for those of other packages.

A test of one's own codec is

    @pytest.mark.parametrize("codec", [LatticeCodec(), LatticeCodec(radius=3)])
    def test_contract(codec):
        check_codec(codec)
"""

from __future__ import annotations

import torch
from torch import Tensor

from zpp_lab.codecs.base import Codec, SegmentNoise, encode
from zpp_lab.codecs.noise import Noise

LENGTHS = (1, 15, 16, 64, 257, 1000)
ROWS = 3


def check_codec(codec: Codec, device: str = "cpu") -> None:
    """Raise AssertionError with the reason when `codec` breaks the contract of `codecs/base.py`.
    Checks byte counts, that every byte is written, that rows are independent, the order of sums,
    one result for one input, and that NaN and Inf stay visible."""
    hash(codec)  # a frozen dataclass is; layouts group segments by it
    assert codec.nbytes(0) == 0, f"nbytes(0) is {codec.nbytes(0)}: no elements take no bytes"
    for numel in LENGTHS:
        x = _values(numel, device)
        payload = _check_bytes(codec, x)
        _check_rows(codec, x, payload)
        _check_sums(codec, payload, numel)
        _check_faults(codec, x)
        if codec.one_hop:
            kept = codec.sent(x)
            fits = kept.shape == x.shape and kept.dtype == torch.float32
            assert fits, f"sent gives {kept.dtype} {tuple(kept.shape)}: use fp32 {tuple(x.shape)}"


def _values(numel: int, device: str) -> Tensor:
    """fp32 [ROWS, numel]: normal numbers, one row with outliers, one with exact zeros."""
    x = torch.randn(ROWS, numel, generator=torch.Generator().manual_seed(numel))
    x[1, ::7] *= 100
    x[2, ::2] = 0
    return x.to(device)


def _noise(codec: Codec, rows: tuple[int, ...] = tuple(range(ROWS))) -> SegmentNoise | None:
    """Each payload row's own noise; None for a codec that needs none."""
    return SegmentNoise(Noise(1, (0,) * len(rows), rows), 7) if codec.stochastic else None


def _check_bytes(codec: Codec, x: Tensor) -> Tensor:
    """Return the payload, uint8 [ROWS, nbytes], after checking that encode writes all of it."""
    numel = x.shape[1]
    nbytes = codec.nbytes(numel)
    assert nbytes % 16 == 0, f"nbytes({numel}) is {nbytes}: round it up to a multiple of 16"
    payloads = []
    for before in (0x00, 0xFF):
        out = torch.full((len(x), nbytes), before, dtype=torch.uint8, device=x.device)
        codec.encode(x, _noise(codec), out)
        payloads.append(out)
    same = torch.equal(*payloads)
    assert same, f"encode of {numel} elements leaves bytes of `out` unwritten, or is random"
    return payloads[0]


def _check_rows(codec: Codec, x: Tensor, payload: Tensor) -> None:
    numel = x.shape[1]
    y = codec.decode(payload, numel)
    assert y.shape == x.shape, f"decode gives {tuple(y.shape)}, not {tuple(x.shape)}"
    assert y.dtype == torch.float32, f"decode gives {y.dtype}, not float32"
    assert bool(torch.isfinite(y).all()), f"finite values of {numel} elements decode to NaN or Inf"
    for r in range(ROWS):
        alone = encode(codec, x[r : r + 1], _noise(codec, (r,)))
        assert torch.equal(alone, payload[r : r + 1]), f"row {r}'s bytes depend on other rows"
        assert torch.equal(codec.decode(alone, numel), y[r : r + 1]), "decoding mixes rows"


def _check_sums(codec: Codec, payload: Tensor, numel: int) -> None:
    stacked = torch.stack((payload, payload.flip(0)))
    total = codec.decode_sum(stacked, numel)
    if codec.rotation is None:
        want = 0 + codec.decode(stacked[0], numel) + codec.decode(stacked[1], numel)
        assert torch.equal(total, want), "decode_sum is not 0 + row 0 + row 1 + ... in fp32"
    else:
        rotated = codec.decode_sum(stacked, numel, rotated=True)
        want = codec.rotation.inverse(rotated, numel)
        assert torch.equal(total, want), "decode_sum differs from its rotated form"
    shares = codec.saturated(payload, numel)
    fit = shares.shape == payload.shape[:1] and bool(((shares >= 0) & (shares <= 1)).all())
    assert fit, f"saturated gives {shares}: it is each row's share of codes"


def _check_faults(codec: Codec, x: Tensor) -> None:
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[1, -1] = bad
        y = codec.decode(encode(codec, broken, _noise(codec)), x.shape[1])
        assert not bool(torch.isfinite(y[1, -1])), f"{bad} decodes to {float(y[1, -1])}"
