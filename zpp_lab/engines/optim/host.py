"""Host memory from which a GPU copies directly, and the streams in which it does.

torch pins through an allocator that rounds each tensor up to a power of two, and clears its pages
with one thread: 38 GiB a rank took most of 45 s. Here pages come from the system, several threads
touch them, and the driver registers them in pieces, in a third of the time.

A step uses each moment once, so moments need not lie on the GPU, nor low planes of masters or
gradients. They come in some parameters at a time, are updated by the same code and to the same bits
as on the GPU, and all but gradients go out again. Two streams take turns (`Streams`), so that one's
come while the other's go: the bus carries both ways at once. Updated weights are there before
moments have gone out. High planes that lie here come in the same streams before each gather, and
after an update stay for the gather that waits for it.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from zpp_lab.engines.optim.states import StateKind, moment_bytes

PIECE = 2**34  # bytes that the driver registers at a time
TOUCHED = 2**26  # bytes of a thread's turn
THREADS = 12
STAGE = 2**28  # bytes from host memory that a stream has on the GPU; one parameter's may be more
STREAMS = 2
SMALL = 2**20  # bytes of parameters that travel with a larger one
BEHIND = 1  # units whose weights stay while those of the next come: else these would wait for them

T = TypeVar("T")


class Pages(mmap.mmap):
    """Anonymous memory of whole pages, zeros; `register` lets GPUs copy from it directly until it
    is freed."""

    registered: tuple[int, ...] = ()  # where pieces begin

    def touch(self) -> None:
        """Have the system give all pages now, to several threads at once."""
        whole = torch.frombuffer(self, dtype=torch.uint8)
        turns = [whole[i : i + TOUCHED] for i in range(0, len(whole), TOUCHED)]
        if len(turns) == 1:
            turns[0].zero_()
            return
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(Tensor.zero_, turns))

    def register(self) -> None:
        """MemoryError, naming the setting, where the system cannot pin so much."""
        start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        for at in range(0, len(self), PIECE):
            size = min(PIECE, len(self) - at)
            failed = int(torch.cuda.cudart().cudaHostRegister(start + at, size, 0))
            if failed:
                raise MemoryError(
                    f"{size / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error {failed}):"
                    " leave more on the GPU (engine.place, train.optimizer_place=device), or "
                    "raise the limit of locked memory (ulimit -l)"
                )
            self.registered += (start + at,)

    def __del__(self) -> None:
        for start in self.registered:
            torch.cuda.cudart().cudaHostUnregister(start)


def zeros(shape: Iterable[int], dtype: torch.dtype, device: torch.device, far: bool) -> Tensor:
    """Allocate zeros on `device`, or (`far`) in host memory, from which a GPU `device` copies
    directly."""
    size = tuple(shape)
    nbytes = prod(size) * dtype.itemsize
    if not far or device.type != "cuda" or not nbytes:
        return torch.zeros(size, dtype=dtype, device="cpu" if far else device)
    pages = Pages(-1, pinned_bytes(nbytes))
    pages.touch()
    pages.register()
    return torch.frombuffer(pages, dtype=dtype, count=prod(size)).view(size)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes of the pages that a tensor takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def pinned_state_bytes(shape: Sequence[int], kind: StateKind) -> int:
    """Return the pinned bytes of both moments of a shard and their scales."""
    return 2 * sum(map(pinned_bytes, moment_bytes(shape, kind)))


def stages(items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield what passes together, of items that come with so many bytes. Small ones go first, with
    a larger one: in a stage of their own, whose stream the next one would have, nothing would come
    until the large one before them has left."""
    sizes = [(item, size if (size := nbytes(item)) >= SMALL else 0) for item in items]
    sizes.sort(key=lambda each: each[1] > 0)
    for some in together(sizes, lambda each: each[1], STAGE):
        yield [item for item, _ in some]


def together(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in order in lists whose sizes add up to at most `most`, or of a single item, with
    those before it that have no size."""
    batch: list[T] = []
    held = 0
    for item in items:
        if held and held + size(item) > most:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size(item)
    if batch:
        yield batch


class Streams:
    """Streams next to the current one, in turns; a CPU has none, and everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(STREAMS)] if cuda else []
        self.turns = 0
        self.ended: dict[Tensor, Any] = {}  # the event after an item's last body
        # what other streams read, with the event after they have
        self.read: deque[tuple[Any, Sequence[Tensor]]] = deque()

    @contextmanager
    def next(self, items: Sequence[Tensor]) -> Iterator[None]:
        """Run the body's work after what the current stream has so far, and after the last body of
        each of these items, which another stream may have."""
        if not self.streams:
            yield
            return
        stream = self.streams[self.turns % STREAMS]
        self.turns += 1
        while len(self.read) > BEHIND:
            done, _ = self.read.popleft()  # and their memory goes back to the streams
            for each in self.streams:
                each.wait_event(done)
        stream.wait_stream(torch.cuda.current_stream())
        self.follow(stream, items)
        with torch.cuda.stream(stream):
            yield
        self.ended |= dict.fromkeys(items, stream.record_event())

    def follow(self, stream: Any, items: Sequence[Tensor]) -> None:
        """Let a stream wait for the last body of each of these items."""
        for item in items:
            if item in self.ended:
                stream.wait_event(self.ended[item])

    def let_go(self, tensors: Sequence[Tensor]) -> None:
        """The current stream has read what bodies made, and waits for all others that have."""
        for tensor in tensors:
            vacate(tensor)
        if self.streams and tensors:
            self.read.append((torch.cuda.current_stream().record_event(), tensors))

    def mark(self) -> list[Any]:
        """Return the event after what a body has done so far; none on a CPU."""
        return [torch.cuda.current_stream().record_event()] if self.streams else []

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


def vacate(tensor: Tensor) -> None:
    """Tell that what came from host memory is used up; tests then fill it with NaN."""
