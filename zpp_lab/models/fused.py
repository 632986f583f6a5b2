"""The decoder's chains of elementwise kernels as one kernel each, with the bits of torch's own.

A small model's time goes into passes over activations. Eagerly a rotation is a cast, a complex
product and a cast, and each reads and writes the whole tensor; SwiGLU takes two kernels forward and
three backward. On a GPU each is one Triton kernel here. It rounds where torch's kernels round,
fuses a product into a sum where torch's build does, and takes exp, log and division from the same
library, so runs keep their bits: tests/models/test_fused.py compares them on a GPU. What autograd
keeps of these two is the same too. Elsewhere, and in compiled blocks, torch's operators do it. A
machine without Triton, or without the C compiler that starts its kernels, is slower and has the
same bits.

Cross-entropy moves most of all: whole logits in fp32, their log-softmax, its gradient and that of
the logits, 36 bytes a logit. Here it is 6, and some 24 where torch adds: the logits stay as the
product left them, and of each row two numbers are kept, its largest logit and the logarithm of its
sum, from which backward makes a log-probability again. The bits of a row's sum depend on the order
in which its terms are added, and torch's kernels add in orders of their own by version and
vocabulary. So the kernel that adds in one such order serves where torch is seen to have the same
one; elsewhere torch's own takes the logarithms, and backward alone is one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zpp_lab.codecs.kernels.backend import triton_serves

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # torch for CPUs comes without it
    triton = None

BLOCK = 1024  # pairs or elements of a program
THREADS = 1024  # that add a row side by side in torch's kernel, as 32 warps of 32
MOST_SUMS = 16  # terms of each of them; the loop over them is unrolled
SEEN_ROWS = 256  # that tell torch's order of adding: of 512 rows another order changed 116
HALVES = (torch.bfloat16, torch.float16)  # fp32 would gain no cast


def serves(x: Tensor) -> bool:
    """Return whether the kernels take `x` and tensors shaped like it."""
    if torch.compiler.is_compiling() or not triton_serves(x):
        return False
    even = x.storage_offset() % 2 == 0  # pairs are read as words
    return x.dtype in HALVES and x.is_contiguous() and even and 0 < x.numel() < 2**31


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x, [batch, length, heads, head_dim], which `serves`, by table,
    fp32 [length, 1, head_dim / 2, 2]; returns x's dtype."""
    out: Tensor = _Rotated.apply(x, table)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, which `serves`, with silu(gate) rounded to their dtype."""
    assert serves(up), "its gate is served, and it lies elsewhere"
    assert (up.shape, up.dtype) == (gate.shape, gate.dtype), "unlike its gate"
    if not torch.is_grad_enabled():
        return _product(gate, up, None)
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each row's target log-probability, fp32 [N], of log_softmax(logits, in fp32). logits
    [N, vocab], which `serves`; targets int64 [N], each in the vocabulary."""
    out: Tensor = _LogProbs.apply(logits, targets)  # type: ignore[no-untyped-call]
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
    out, (batch, length, heads, dim) = torch.empty_like(x), x.shape
    row = heads * dim // 2
    _turn_kernel[(-(-length * row // BLOCK) * batch,)](
        x.view(torch.int32), table.view(torch.int64), out, out.view(torch.int32), length * row,
        row, dim // 2, back, BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
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


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        made, top, log_sum = _rows_of(logits, targets)
        ctx.save_for_backward(logits, targets, top, log_sum)
        return made

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets, top, log_sum = ctx.saved_tensors
        out, (rows, vocab) = torch.empty_like(logits), logits.shape
        _logits_back_kernel[(rows, -(-vocab // BLOCK))](
            grad.contiguous(), logits, targets, top, log_sum, out, vocab, BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out, None


def _rows_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's target log-probability, largest logit, and log of sum exp(logit -
    largest)."""
    if _known_order(logits.shape[1], logits.dtype, logits.device):
        return _log_probs(logits, targets)
    whole = torch.log_softmax(logits.float(), -1)
    # at the largest logit it is 0 - that logarithm
    made = whole.gather(1, targets[:, None]).squeeze(1)
    return made, logits.amax(-1).float(), -whole.amax(-1)


def _log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    made, top, log_sum = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _log_probs_kernel[(rows,)](
        logits, targets, made, top, log_sum, vocab, -(-vocab // THREADS), enable_fp_fusion=False,
        num_warps=8,
    )  # fmt: skip
    return made, top, log_sum


def _known_order(vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's log-softmax of such rows adds in the order of `_log_probs_kernel`."""
    if vocab > MOST_SUMS * THREADS:
        return False
    if (vocab, dtype, device) not in _SEEN:
        if torch.cuda.is_current_stream_capturing():  # nothing can be looked at
            return False
        turns = torch.arange(SEEN_ROWS * vocab, device=device, dtype=torch.float64)
        logits = (4 * turns.mul_(0.7).sin_()).view(SEEN_ROWS, vocab).to(dtype)
        targets = torch.arange(SEEN_ROWS, device=device) % vocab
        found = _log_probs(logits, targets)[0]
        wanted = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)
        _SEEN[vocab, dtype, device] = torch.equal(found, wanted)
    return _SEEN[vocab, dtype, device]


_SEEN: dict[tuple[int, torch.dtype, torch.device], bool] = {}


if triton is not None:  # fusion is off: what torch's build fuses is written as fma

    @triton.jit  # type: ignore[misc]
    def _turn_kernel(
        x, table, like, out, pairs, row: tl.constexpr, half: tl.constexpr, back: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        """Sequences of `pairs` pairs. Pair i of one has the turn of its position, i // row, and its
        place in a head. A pair is one word of x and a turn one of the table, so that neither is
        taken apart between threads. row: pairs of a position, a constant, since dividing by a
        runtime value is slow. like: for its dtype."""
        dtype = like.dtype.element_ty
        blocks = tl.cdiv(pairs, BLOCK)
        sequence, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        pair = block * BLOCK + tl.arange(0, BLOCK)
        at, inside = sequence * pairs + pair, pair < pairs
        word = tl.load(x + at, inside, other=0)
        a = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        b = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        turn = tl.load(table + (pair // row * half + pair % half), inside, other=0)
        cosine = turn.to(tl.int32).to(tl.float32, bitcast=True)
        sine = (turn >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        if back:
            sine = -sine
        real = tl.fma(a, cosine, -(b * sine)).to(dtype).to(tl.int16, bitcast=True)
        imaginary = tl.fma(a, sine, b * cosine).to(dtype).to(tl.int16, bitcast=True)
        word = (real.to(tl.int32) & 0xFFFF) | (imaginary.to(tl.int32) << 16)
        tl.store(out + at, word, inside)

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

    @triton.jit  # type: ignore[misc]
    def _log_probs_kernel(logits, targets, made, top, log_sum, vocab, SUMS: tl.constexpr):  # type: ignore[no-untyped-def]
        """A row as 1024 threads add it: each every 1024th term, then 32 threads and 32 warps, each
        by halves."""
        row = tl.program_id(0)
        at = tl.arange(0, 1024)
        logits += row * vocab
        most = tl.full((1024,), float("-inf"), tl.float32)
        for i in tl.static_range(SUMS):
            column = i * 1024 + at
            x = tl.load(logits + column, column < vocab, other=float("-inf")).to(tl.float32)
            most = tl.maximum(most, x)
        largest = tl.max(most, 0)
        sums = tl.zeros((1024,), tl.float32)
        for i in tl.static_range(SUMS):
            column = i * 1024 + at
            x = tl.load(logits + column, column < vocab, other=0.0).to(tl.float32)
            sums += tl.where(column < vocab, libdevice.exp(x - largest), 0.0)
        rows = tl.reshape(sums, (32, 2, 16))
        rows = tl.reshape(tl.sum(rows, 1), (32, 2, 8))
        rows = tl.reshape(tl.sum(rows, 1), (32, 2, 4))
        rows = tl.reshape(tl.sum(rows, 1), (32, 2, 2))
        rows = tl.reshape(tl.sum(rows, 1), (32, 2))
        warps = tl.reshape(tl.sum(rows, 1), (2, 16))
        warps = tl.reshape(tl.sum(warps, 0), (2, 8))
        warps = tl.reshape(tl.sum(warps, 0), (2, 4))
        warps = tl.reshape(tl.sum(warps, 0), (2, 2))
        warps = tl.sum(warps, 0)
        log = libdevice.log(tl.sum(warps, 0))
        target = tl.load(logits + tl.load(targets + row)).to(tl.float32)
        tl.store(made + row, target - largest - log)
        tl.store(top + row, largest)
        tl.store(log_sum + row, log)

    @triton.jit  # type: ignore[misc]
    def _logits_back_kernel(grad, logits, targets, top, log_sum, out, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Of a row whose only gradient is its target's, which is therefore the sum of them too."""
        row = tl.program_id(0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at, inside = row * vocab + column, column < vocab
        x = tl.load(logits + at, inside).to(tl.float32)
        log = x - tl.load(top + row) - tl.load(log_sum + row)
        own = tl.load(grad + row)
        to_log = tl.where(column == tl.load(targets + row), own, 0.0)
        to_x = tl.fma(-libdevice.exp(log), own, to_log)
        tl.store(out + at, to_x.to(out.dtype.element_ty), inside)
