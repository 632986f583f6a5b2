"""Host memory from which a GPU copies directly, and the streams in which it does.

torch pins through an allocator that rounds each tensor up to a power of two, and clears its pages
with one thread: 38 GiB a rank took most of 45 s. Here pages come from the system, several threads
touch them, and the driver registers them in pieces, in a third of the time.

A step uses each moment once, so moments need not lie on the GPU, nor low planes of masters or
gradients. They come in some parameters at a time, or some rows of a large one, are updated by the
same code and to the same bits as on the GPU, and all but gradients go out again. Two streams take
turns (`Streams`), so that one's come while the other's go: the bus carries both ways at once.
Updated weights are there before moments have gone out. High planes that lie here come in the same
streams before each gather, and after an update stay for the gather that waits for it, whole: their
parameters are not cut.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zpp_lab.engines.optim.states import StateKind, moment_bytes

PIECE = 2**34  # bytes that the driver registers at a time
TOUCHED = 2**26  # bytes of a thread's turn
THREADS = 12
STAGE = 2**28  # bytes from host memory that a stream has on the GPU; one row's may be more
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


@dataclass(frozen=True, eq=False)
class Piece(Generic[T]):
    """Rows of a parameter that pass together; None: all. `nbytes`: what they come with."""

    item: T
    rows: range | None = None
    nbytes: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor that has all."""
        return tensor if self.rows is None else tensor[self.rows.start : self.rows.stop]


def pieces(item: T, nbytes: int, rows: int) -> list[Piece[T]]:
    """Cut what comes with so many bytes into equal parts that a stage has room for."""
    most = max(1, STAGE * rows // max(1, nbytes))
    if nbytes < SMALL or rows <= most:
        return [Piece(item, None, nbytes)]
    each = -(-rows // -(-rows // most))
    parts = [range(first, min(first + each, rows)) for first in range(0, rows, each)]
    return [Piece(item, part, nbytes * len(part) // rows) for part in parts]


def stages(
    items: Iterable[T], nbytes: Callable[[T], int], rows: Callable[[T], int]
) -> Iterator[list[Piece[T]]]:
    """Yield what passes together, of items that come with so many bytes and may be cut into so many
    rows. Small ones go first, with a larger one: in a stage of their own, whose stream the next one
    would have, nothing would come until the large one before them has left. Large ones are cut: no
    stage is larger than `STAGE`, and a piece is updated while the next one comes."""
    every = [piece for item in items for piece in pieces(item, nbytes(item), rows(item))]

    def size(piece: Piece[T]) -> int:
        return piece.nbytes if piece.rows is not None or piece.nbytes >= SMALL else 0

    return together(sorted(every, key=lambda piece: size(piece) > 0), size, STAGE)


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
        # by stream, the event after an item's last body there
        self.ended: list[dict[Tensor, Any]] = [{} for _ in self.streams]
        # what other streams read, with the event after they have
        self.read: deque[tuple[Any, Sequence[Tensor]]] = deque()

    @contextmanager
    def next(self, items: Sequence[Tensor]) -> Iterator[None]:
        """Run the body's work, on rows of these items, after what the current stream has so far.
        Before an item's first rows: `follow`."""
        if not self.streams:
            yield
            return
        which = self.turns % STREAMS
        stream = self.streams[which]
        self.turns += 1
        while len(self.read) > BEHIND:
            done, _ = self.read.popleft()  # and their memory goes back to the streams
            for each in self.streams:
                each.wait_event(done)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        self.ended[which] |= dict.fromkeys(items, stream.record_event())

    def follow(self, items: Sequence[Tensor]) -> None:
        """Let all of them wait for all bodies that these items have had."""
        for event in {ended[item] for ended in self.ended for item in items if item in ended}:
            for stream in self.streams:
                stream.wait_event(event)

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
