"""Host memory of exact sizes from which a GPU copies directly.

torch pins through an allocator that rounds each tensor up to a power of two, and clears its pages
with one thread: 38 GiB a rank took most of 45 s. Here pages come from the system, several threads
touch them, and the driver registers them in pieces, in a third of the time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor

PIECE = 2**34  # bytes that the driver registers at a time
TOUCHED = 2**26  # bytes of a thread's turn
THREADS = 12


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


def zeros(shape: Iterable[int], dtype: torch.dtype, pin: bool) -> Tensor:
    """Allocate zeros in host memory, from which GPUs copy directly if `pin`."""
    size = tuple(shape)
    nbytes = prod(size) * dtype.itemsize
    if not pin or not nbytes:
        return torch.zeros(size, dtype=dtype)
    pages = Pages(-1, pinned_bytes(nbytes))
    pages.touch()
    pages.register()
    return torch.frombuffer(pages, dtype=dtype, count=prod(size)).view(size)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes of the pages that a tensor takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
