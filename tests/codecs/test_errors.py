"""The error sums that telemetry is made of: what they are, and the order in which they add."""

from __future__ import annotations

import pytest
import torch

from zpp_lab.codecs import BlockCodec, Noise, RawCodec, SegmentNoise, encode
from zpp_lab.codecs.errors import SUMS, TILE, Column, ErrorSums, error_sums, telemetry

CODECS = [
    BlockCodec(2, 64),
    BlockCodec(4, 64, symmetric=False),
    BlockCodec(6, 256, scale_dtype="bf16", rounding="stochastic"),
    BlockCodec(8, 64, hadamard=64, random_signs=True),
    RawCodec(torch.bfloat16),
]


def payload_of(codec, x):  # type: ignore[no-untyped-def]
    noise = Noise(3, (0,) * len(x), tuple(range(len(x))))
    return encode(codec, x, SegmentNoise(noise, 9))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [1, 100, TILE, 3 * TILE + 77])
def test_sums_are_what_their_names_say(codec, numel: int) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    payload = payload_of(codec, x)
    got = dict(zip(SUMS, error_sums(codec, x, payload).unbind(1), strict=True))
    a, b = x.double(), codec.decode(payload, numel).double()
    want = {
        "error2": (b - a).square(), "x2": a.square(), "y2": b.square(), "xy": a * b,
        "error": b - a, "abs_x": a.abs(), "zeroed": ((b == 0) & (a != 0)).double(),
    }  # fmt: skip
    for name, terms in want.items():
        torch.testing.assert_close(got[name], terms.sum(1), rtol=1e-12, atol=1e-12)
    assert got["count"].tolist() == [numel] * 2
    shares = [float(codec.saturated(row[None], numel)) for row in payload]
    assert got["saturated"].tolist() == [s * numel for s in shares]


def test_a_tile_is_added_as_one_thread_block_adds_it() -> None:
    """The order, written out once more element by element, where it shows in the last bits."""
    x = torch.randn(1, TILE, generator=torch.Generator().manual_seed(1))
    codec = RawCodec(torch.float32)
    got = error_sums(codec, x, payload_of(codec, x))[0, SUMS.index("x2")]
    values, warps = x[0].double().square().tolist(), []
    for warp in range(8):
        lanes = []
        for lane in range(32):
            total = 0.0
            for chunk in range(4):
                at = warp * 1024 + chunk * 256 + lane * 8
                for value in values[at : at + 8]:
                    total += value
            lanes.append(total)
        while len(lanes) > 1:
            lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        warps.append(lanes[0])
    want = warps[0]
    for part in warps[1:]:
        want += part
    in_a_row = 0.0
    for value in values:
        in_a_row += value
    assert float(got) == want != in_a_row


def test_telemetry_does_not_depend_on_the_order_in_which_sums_came() -> None:
    columns = [Column("grads_intra", "mlp", name, micro) for name in "abc" for micro in (0, 1)]
    sums = torch.randn(2, 6, 9, dtype=torch.float64).abs()
    found = []
    for turn in (1, -1):
        errors = ErrorSums()
        for rank in (0, 1)[::turn]:
            for i in range(6)[::turn]:
                errors.add(columns[i], rank, sums[rank, i])
        found.append(telemetry(*errors.by_rank()))
    assert found[0] == found[1]
    assert found[0]["grads_intra"]["mlp"]["nmse"] > 0
    errors.drop({("grads_intra", name) for name in "abc"})
    assert telemetry(*errors.by_rank()) == {}


@pytest.mark.parametrize("numel", [1, 8, 257, 1025, TILE - 1])
def test_part_of_a_tile_adds_as_the_whole_tile_does(numel: int) -> None:
    x = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    whole = torch.nn.functional.pad(x, (0, TILE - numel))
    codec = RawCodec(torch.float32)
    few, all_of_it = (error_sums(codec, v, payload_of(codec, v)) for v in (x, whole))
    assert torch.equal(few[:, :-1], all_of_it[:, :-1])
