"""The codec kernels, whole, compiled for the host: they equal the reference without a GPU.

Compiling them takes two minutes of a core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.codecs.kernels import cases
from tests.cuda.host import STABLE, TORCH
from zpp_lab.codecs import BlockCodec, Noise, NormalCodec
from zpp_lab.codecs.kernels import build, cuda, reference
from zpp_lab.codecs.layout import Layout
from zpp_lab.config.codec import BITS, BLOCK_SIZES, NORMAL_BITS
from zpp_lab.files import cuda_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not STABLE, reason="needs torch's stable headers"),
]
NUMEL = 20011
NOISE = Noise(0x0123456789ABCDEF, (3, 5), (0, 1))


class HostTorch:
    """torch, with the host's operators in place of the GPU's."""

    ops = SimpleNamespace(zpp_lab=torch.ops.zpp_host)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`kernels/cuda.py` on them."""
    try:
        tools = build.Toolchain.find()
    except RuntimeError as error:
        pytest.skip(str(error))
    source = cuda_dir().parent / "tests" / "cuda" / "host_kernels.cpp"
    target = tmp_path_factory.mktemp("host") / "host_kernels.so"
    includes = ["-I", str(cuda_dir()), "-I", str(source.parent), "-I", str(tools.cutlass)]
    host = (
        "-fPIC,-fpermissive,-w,-ffp-contract=off,-fno-strict-aliasing"  # CUTLASS names intrinsics
    )
    flags = ["-std=c++17", "-O1", "-shared", "-Xcompiler", host, *includes]
    flags += ["-isystem", str(TORCH / "include"), "-DUSE_CUDA"]
    flags += [f"-DTORCH_TARGET_VERSION={build.TARGET}", "-L", str(TORCH / "lib")]
    build._run([tools.nvcc, *flags, str(source), "-o", str(target), "-ltorch_cpu", "-lc10"])
    torch.ops.load_library(str(target))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "torch", HostTorch())
        yield cuda


@pytest.mark.parametrize("start", [0, 7_770_000])
def test_random_cases_equal_the_reference(start: int, kernels: Any) -> None:
    for seed in range(start, start + 30):
        cases.check(seed, kernels, "cpu")


@pytest.mark.parametrize("bits", BITS)
def test_hard_values_in_every_block_size_equal_the_reference(bits: int, kernels: Any) -> None:
    rows = itertools.cycle(cases.HARD)
    for block, symmetric in itertools.product(BLOCK_SIZES, (True, False)):
        ways = itertools.product(("nearest", "stochastic"), ("fp32", "bf16"))
        codecs = [BlockCodec(bits, block, symmetric, r, s) for r, s in ways]  # type: ignore[arg-type]
        if bits in NORMAL_BITS and symmetric:
            codecs += [NormalCodec(bits, block, scale_dtype=s) for s in ("fp32", "bf16")]  # type: ignore[arg-type]
        layout = Layout.build([f"{i}" for i in range(len(codecs))], [NUMEL] * len(codecs), codecs)
        x = [cases.hard_rows(next(rows), 2, NUMEL).flatten() for _ in codecs]
        want, got = (cases.poisoned(2, layout.nbytes) for _ in range(2))
        reference.encode(layout, x, NOISE, want)
        kernels.encode(layout, x, NOISE, got)
        cases.same_payload(f"block {block}", layout, got, want)
        decoded, mine = ([torch.full_like(v, fill) for v in x] for fill in (1.0, 2.0))
        reference.decode(layout, want, decoded)
        kernels.decode(layout, got, mine)
        for codec, a, b in zip(codecs, mine, decoded, strict=True):
            cases.same(str(codec), a, b)
