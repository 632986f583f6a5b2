"""What lies in cuda/, compiled for the host: its operators, plans and arithmetic without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from zpp_lab.codecs.kernels import build
from zpp_lab.files import cuda_dir

CXX = shutil.which("g++") or shutil.which("clang++")
TORCH = Path(torch.__file__).parent
STABLE = (TORCH / "include" / "torch" / "csrc" / "stable").is_dir()
with_compiler = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
with_operators = pytest.mark.skipif(
    CXX is None or not STABLE, reason="needs a C++ compiler and torch's stable headers"
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compiled(name: str, folder: Path, *, operators: bool = False) -> Path:
    """tests/cuda/NAME.cpp → a shared library in `folder`; with `operators` linked to torch."""
    source, target = Path(__file__).with_name(f"{name}.cpp"), folder / f"{name}.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    flags += [f"-I{cuda_dir()}"]
    libraries = []
    if operators:
        flags += ["-isystem", str(TORCH / "include"), "-DUSE_CUDA"]
        flags += [f"-DTORCH_TARGET_VERSION={build.TARGET}"]
        libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run([str(CXX), *flags, str(source), "-o", str(target), *libraries], check=True)
    return target


def load_operators(name: str, folder: Path) -> None:
    """Registers the operators of tests/cuda/NAME.cpp as torch.ops.zpp_host's."""
    torch.ops.load_library(str(compiled(name, folder, operators=True)))
