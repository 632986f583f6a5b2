"""What a run takes beside its steps: seconds until the first one has ended, and peak memory."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

GIB = 2**30


class StartUp:
    """Seconds of each part of a start, in order; the last is the first step, compiling included."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        """`part` has just ended; a part that ended before is left as it was."""
        now = time.perf_counter()
        if part not in self.seconds:
            self.seconds[part] = round(now - self._last, 3)
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        return f"start-up: {parts}"


def peak_gib(device: torch.device) -> list[float] | None:
    """The most GiB of tensors that each rank has held on its GPU; None on the CPU.

    Every rank of the default process group must call it.
    """
    if device.type != "cuda":
        return None
    own = torch.cuda.max_memory_allocated(device) / GIB
    if not dist.is_initialized():
        return [own]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every
