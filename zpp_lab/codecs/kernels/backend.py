"""Which implementation serves: CUDA kernels or plain torch.

`auto` takes kernels for CUDA tensors; where they cannot be built or loaded it says so once, on
standard error, and the reference serves. `cuda` and `reference` are forced choices: one that
cannot be met is an error.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "cuda", "reference"]


@dataclass
class _State:
    backend: Backend = "auto"
    loaded: bool = False
    problem: str | None = None  # why the kernels could not be had


_state = _State()


def configure(backend: Backend = "auto") -> None:
    """Choose the implementation for this process. ValueError for an unknown name, and when `cuda`
    cannot be had."""
    if backend not in get_args(Backend):
        raise ValueError(f"ops.backend={backend!r}: use one of {', '.join(get_args(Backend))}")
    if backend == "cuda" and not _load(forced=True):
        raise ValueError(f"ops.backend=cuda: {_state.problem}; set ops.backend=auto")
    _state.backend = backend


def status(try_load: bool = False) -> dict[str, str | bool | None]:
    """Report for `zpp-lab doctor`: the choice, whether kernels are loaded, and why they are not."""
    if try_load and _state.backend != "reference":
        _load()
    problem = _state.problem or (None if torch.cuda.is_available() else _no_gpu())
    return {"backend": _state.backend, "kernels": _state.loaded, "problem": problem}


def use_kernels(tensor: Tensor) -> bool:
    """Return whether a call with this tensor goes to the kernels."""
    if _state.backend == "reference":
        return False
    if not tensor.is_cuda:
        if _state.backend == "cuda":
            raise ValueError(
                f"ops.backend=cuda, but the tensors are on {tensor.device}: "
                "set engine.device=cuda or ops.backend=auto"
            )
        return False
    return _state.loaded or _load()


def triton_serves(tensor: Tensor) -> bool:
    """Return whether Triton kernels may take this tensor: on a GPU, with Triton and a C compiler
    installed. `reference` turns them off too. Not for compiled code."""
    return tensor.is_cuda and _state.backend != "reference" and _can_launch_triton()


@lru_cache
def _can_launch_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:  # torch for CPUs comes without it
        return False
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _load(forced: bool = False) -> bool:
    if _state.loaded or _state.problem:
        return _state.loaded
    try:
        _load_library()
        _state.loaded = True
    except (RuntimeError, OSError) as error:
        _state.problem = str(error)
        if not forced:
            print(f"zpp_lab: no CUDA kernels, falling back to PyTorch: {error}", file=sys.stderr)
    return _state.loaded


def _load_library() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(_no_gpu())
    from zpp_lab.codecs.kernels import build, cuda

    path, what = build.serving()
    if path is None:
        path = build.library()
        what = f"cache {path}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        fix = f"{error}; without {path.parent} kernels are compiled here"
        raise RuntimeError(f"{what} cannot be loaded: {fix}") from None
    cuda.register_fakes()


def _no_gpu() -> str:
    return "torch finds no CUDA GPU"
