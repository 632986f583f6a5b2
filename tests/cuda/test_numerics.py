"""The kernels' arithmetic, compiled for the host, against the plain-torch reference."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.codecs.kernels.cases import HARD, hard_rows
from tests.cuda.host import compiled, with_compiler
from zpp_lab.codecs import BlockCodec, Noise, SegmentNoise, encode
from zpp_lab.codecs.hadamard import sign_words
from zpp_lab.files import cuda_dir

pytestmark = with_compiler

SPECS = [
    BlockCodec(bits, block, symmetric, rounding, scale, hadamard)  # type: ignore[arg-type]
    for bits, symmetric, rounding, scale, (block, hadamard) in itertools.product(
        (2, 3, 4, 6, 8),
        (True, False),
        ("nearest", "stochastic"),
        ("fp32", "bf16"),
        ((16, 0), (256, 0), (256, 64)),
    )
]
NOISE = Noise(0xFEDCBA9876543210, (3, 70000), (1, 2))
PARAMETER = 0xDEADBEEF


@pytest.fixture(scope="module")
def run_row(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return ctypes.CDLL(str(compiled("host_numerics", tmp_path_factory.mktemp("host")))).run_row


def call(
    run_row: Callable[..., None], codec: BlockCodec, x: Tensor, out: Tensor, row: int, go: int
):
    words = (NOISE.rows[row], NOISE.ranks[row], PARAMETER, NOISE.key & 0xFFFFFFFF, NOISE.key >> 32)
    run_row(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.numel() - 8), codec.bits, codec.symmetric,
        codec.stochastic, ctypes.c_long(codec.block_size), codec.scale_dtype == "bf16",
        codec.hadamard or 1, (ctypes.c_uint32 * 5)(*words), ctypes.c_void_p(out.data_ptr()), go,
    )  # fmt: skip


@pytest.mark.parametrize("codec", SPECS, ids=str)
def test_bits_equal_the_reference(codec: BlockCodec, run_row: Callable[..., None]) -> None:
    """Of rows in the rotated domain, where the codec has one."""
    for name in HARD:
        x = hard_rows(name, 2, codec.coded_numel(1003))
        n = x.shape[1]
        want = encode(codec, x, SegmentNoise(NOISE, PARAMETER), rotated=bool(codec.hadamard))
        decoded = codec.decode_sum(want[None], n, rotated=bool(codec.hadamard))
        for row in range(2):
            padded = torch.nn.functional.pad(x[row], (0, 8)).contiguous()
            out = torch.zeros(want.shape[1], dtype=torch.uint8)
            call(run_row, codec, padded, out, row, 1)
            assert torch.equal(out, want[row]), f"{name} row {row}: payload"
            back = torch.zeros_like(padded)
            call(run_row, codec, back, out, row, 0)
            torch.testing.assert_close(back[:n], decoded[row], rtol=0, atol=0, equal_nan=True)


def test_signs_are_those_of_the_rotation() -> None:
    text = (cuda_dir() / "codec/numerics.cuh").read_text().lower()
    assert all(f"0x{word:08x}u" in text for word in sign_words())
