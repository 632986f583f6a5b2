"""Moments that lie in host memory and pass through the GPU that updates them.

Where masters and gradients fill the GPUs, moments need not: a step wants each of them once. They
come in some parameters at a time, are updated by what updates moments on the GPU, with the same
bits, and go out again. Two streams take turns, so that one's moments come while the other's go:
the bus carries both ways at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zpp_lab.optimizers.states import StateKind, moment_bytes

STAGE = 2**28  # bytes of moments that a lane has on the GPU; one parameter's may be more
LANES = 2


class Lanes:
    """Streams beside the current one, in turns; on a CPU there are none, and all is in order."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(LANES)] if cuda else []
        self.turns = 0

    @contextmanager
    def next(self) -> Iterator[None]:
        """What is started inside runs after what the current stream has so far."""
        if not self.streams:
            yield
            return
        stream = self.streams[self.turns % LANES]
        self.turns += 1
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What the current stream does from here on comes after all lanes."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


def zeros(shape: Iterable[int], dtype: torch.dtype, device: torch.device, host: bool) -> Tensor:
    """A moment's memory on `device`, or (`host`) where a GPU `device` reads it directly."""
    if not host:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def pinned_state_bytes(shape: Sequence[int], kind: StateKind) -> int:
    """Of both moments of a shard of this shape, scales included, each a tensor of its own."""
    return sum(2 * pinned_bytes(nbytes) for nbytes in moment_bytes(shape, kind))


def pinned_bytes(nbytes: int) -> int:
    """What a tensor of so many bytes takes of host memory: powers of two are handed out."""
    return 1 << max(0, nbytes - 1).bit_length()
