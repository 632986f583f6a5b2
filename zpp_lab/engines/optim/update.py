"""AdamW's update on a GPU: the kernel's call, and moments that lie in host memory.

The kernel of cuda/optim/adamw.cu takes many parameters in one call, so the host's time for a step
does not grow with their elements, and hardly with their number.

Where masters and gradients fill the GPUs, moments need not lie there: a step uses each of them
once. They come in some parameters at a time, are updated by the same code and to the same bits as
on the GPU, and go out again. Two streams take turns (`Streams`), so that one's moments come while
the other's go: the bus carries both ways at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.codecs.kernels.table import signed
from zpp_lab.engines.optim import pinned
from zpp_lab.engines.optim.states import MOMENTS, SCALE, StateKind, moment_bytes

STAGE = 2**28  # bytes of moments that a stream has on the GPU; one parameter's may be more
STREAMS = 2


class Streams:
    """Streams next to the current one, in turns; a CPU has none, and everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(STREAMS)] if cuda else []
        self.turns = 0

    @contextmanager
    def next(self) -> Iterator[None]:
        """Run the body's work after what the current stream has so far."""
        if not self.streams:
            yield
            return
        stream = self.streams[self.turns % STREAMS]
        self.turns += 1
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


def vacate(tensor: Tensor) -> None:
    """Tell that what came from host memory is used up; tests then fill it with NaN."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, host: bool) -> Tensor:
    """Allocate a moment on `device`, or (`host`) where a GPU `device` reads it directly."""
    if not host:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return pinned.zeros(shape, dtype, device.type == "cuda")


def pinned_state_bytes(shape: Sequence[int], kind: StateKind) -> int:
    """Return the pinned bytes of both moments of a shard and their scales."""
    return 2 * sum(map(pinned.pinned_bytes, moment_bytes(shape, kind)))


def serves(weight: Tensor) -> bool:
    """Return whether the kernel updates this weight and all others of its model."""
    return weight.is_cuda and use_kernels(weight)


def launch(
    weights: Sequence[Tensor],
    low: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    offsets: Sequence[int],
    group: Mapping[str, Any],
    rates: Tensor,
    roots: Tensor,
    key: int,
    ok: Tensor | None,
    factor: Tensor | None,
) -> None:
    """Update weights and states as the operators in adamw.py do, to the bit. weights, grads: fp32,
    this rank's rows of parameters with one kind of state; weights are contiguous. low: their low
    planes, if weights are high ones; then grads are bf16, and multiplied by `factor`. states: by
    key. offsets: where rows begin in the step's noise, whose key is `key`. rates, roots: fp32
    [parameters], `rate` and `root` of a `Piece`."""
    first, second = MOMENTS
    operator()(
        weights,
        low,
        [g if g.is_contiguous() else g.contiguous() for g in grads],
        states[first],
        states[second],
        states.get(first + SCALE, ()),
        states.get(second + SCALE, ()),
        offsets,
        signed(key),
        rates,
        roots,
        ok,
        factor,
        *group["betas"],
        group["eps"],
        1 - group["lr"] * group["weight_decay"],
    )


def operator() -> Any:
    return torch.ops.zpp_lab.adamw.default
