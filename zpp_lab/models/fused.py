"""The decoder's chains of elementwise kernels as one kernel each, with the bits of torch's own.

A small model's time goes into passes over activations. Eagerly a rotation is a cast, a complex
product and a cast, and each reads and writes the whole tensor; SwiGLU takes two kernels forward and
three backward. On a GPU each is one Triton kernel here. It rounds where torch's kernels round,
fuses a product into a sum where torch's build does, and takes exp and division from the same
library, so runs keep their bits: tests/models/test_fused.py compares them on a GPU. What autograd
keeps is the same too. Elsewhere, and in compiled blocks, torch's operators do it. A machine without
Triton, or without the C compiler that starts its kernels, is slower and has the same bits.
"""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # torch for CPUs comes without it
    triton = None

BLOCK = 1024  # pairs or elements of a program
HALVES = (torch.bfloat16, torch.float16)  # fp32 would gain no cast


def serves(x: Tensor) -> bool:
    """Whether the kernels take `x` and what is shaped like it."""
    fits = x.is_cuda and x.dtype in HALVES and x.is_contiguous() and 0 < x.numel() < 2**31
    return fits and not torch.compiler.is_compiling() and _can_launch()


@lru_cache
def _can_launch() -> bool:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return triton is not None and compiler is not None


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """x [batch, length, heads, head_dim], which `serves`: its neighbouring pairs turned by table,
    fp32 [length, 1, head_dim / 2, 2], in x's dtype."""
    out: Tensor = _Rotated.apply(x, table)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up of one shape and dtype, which `serves`, with silu(gate) rounded to it."""
    assert serves(up), "its gate is served, and it lies elsewhere"
    assert (up.shape, up.dtype) == (gate.shape, gate.dtype), "unlike its gate"
    if not torch.is_grad_enabled():
        return _product(gate, up, None)
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return _turn(x, table, back=False)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _turn(grad.contiguous(), ctx.table, back=True), None


def _turn(x: Tensor, table: Tensor, back: bool) -> Tensor:
    out, half, pairs = torch.empty_like(x), x.shape[-1] // 2, x.numel() // 2
    turns = x.shape[2] * half, x.shape[1], half
    _turn_kernel[(-(-pairs // BLOCK),)](
        x, table, out, pairs, *turns, back, BLOCK, enable_fp_fusion=False
    )
    return out


class _SwiGLU(torch.autograd.Function):
    """Keeps what autograd keeps of torch's two operators."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        silu = torch.empty_like(gate)
        ctx.save_for_backward(gate, silu, up)
        return _product(gate, up, silu)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, silu, up = ctx.saved_tensors
        to_gate, to_up, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        _swiglu_back_kernel[(-(-n // BLOCK),)](
            grad.contiguous(), gate, silu, up, to_gate, to_up, n, BLOCK, enable_fp_fusion=False
        )
        return to_gate, to_up


def _product(gate: Tensor, up: Tensor, silu: Tensor | None) -> Tensor:
    out, n, keep = torch.empty_like(gate), gate.numel(), silu is not None
    _swiglu_kernel[(-(-n // BLOCK),)](
        gate, up, silu if keep else out, out, n, keep, BLOCK, enable_fp_fusion=False
    )
    return out


if triton is not None:  # fusion is off: what torch's build fuses is written as fma

    @triton.jit  # type: ignore[misc]
    def _turn_kernel(
        x, table, out, pairs, row, length, half, back: tl.constexpr, BLOCK: tl.constexpr
    ):  # type: ignore[no-untyped-def]
        """Pair i of x has the turn of its position, (i // row) % length, and its place in a head.
        row: pairs of one position."""
        first = tl.program_id(0) * BLOCK
        pair = first + tl.arange(0, BLOCK)
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        inside = both < 2 * pairs
        a, b = tl.split(tl.reshape(tl.load(x + both, inside).to(tl.float32), (BLOCK, 2)))
        turn = table + 2 * (pair // row % length * half + pair % half)
        cosine = tl.load(turn, pair < pairs)
        sine = tl.load(turn + 1, pair < pairs)
        if back:
            sine = -sine
        real = tl.fma(a, cosine, -(b * sine))
        imaginary = tl.fma(a, sine, b * cosine)
        tl.store(out + both, tl.interleave(real, imaginary).to(out.dtype.element_ty), inside)

    @triton.jit  # type: ignore[misc]
    def _swiglu_kernel(gate, up, silu, out, n, keep: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        dtype = out.dtype.element_ty
        g = tl.load(gate + at, at < n).to(tl.float32)
        u = tl.load(up + at, at < n).to(tl.float32)
        rounded = tl.div_rn(g, 1.0 + libdevice.exp(-g)).to(dtype)
        if keep:
            tl.store(silu + at, rounded, at < n)
        tl.store(out + at, (rounded.to(tl.float32) * u).to(dtype), at < n)

    @triton.jit  # type: ignore[misc]
    def _swiglu_back_kernel(grad, gate, silu, up, to_gate, to_up, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        dtype = to_gate.dtype.element_ty
        d = tl.load(grad + at, at < n).to(tl.float32)
        g = tl.load(gate + at, at < n).to(tl.float32)
        s = tl.load(silu + at, at < n).to(tl.float32)
        u = tl.load(up + at, at < n).to(tl.float32)
        tl.store(to_up + at, (d * s).to(dtype), at < n)
        to_silu = (d * u).to(dtype).to(tl.float32)
        sigmoid = tl.div_rn(1.0, 1.0 + libdevice.exp(-g))
        slope = tl.fma(g, 1.0 - sigmoid, 1.0)
        tl.store(to_gate + at, (to_silu * sigmoid * slope).to(dtype), at < n)
