"""What a run takes beside its steps: seconds until the first one has ended, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

GIB = 2**30


class StartUp:
    """Seconds of each part of a start, in order; the last is the first step, compiling included.

    `inside` has what the first step consists of, and how much of it all was compiling.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.inside: dict[str, float] = {}

    def done(self, part: str) -> None:
        """`part` has just ended; a part that ended before is left as it was."""
        now = time.perf_counter()
        if part not in self.seconds:
            self.seconds[part] = round(now - self._last, 3)
        self._last = now

    def first_step(self, inside: Mapping[str, float]) -> None:
        """It has just ended."""
        self.done("first step")
        self.inside = {part: round(seconds, 3) for part, seconds in inside.items()}

    def facts(self) -> dict[str, float]:
        """For the summary."""
        return self.seconds | {f"first step, {k}": s for k, s in self.inside.items()}

    def __str__(self) -> str:
        inside = f" ({_listed(self.inside)})" if self.inside else ""
        return f"start-up: {_listed(self.seconds)}{inside}"


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())


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
