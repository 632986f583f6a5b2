"""What a run needs besides its steps: seconds until the first one has ended, and memory.

`StartUp` has the seconds, `peak_gib` the memory, and `settled` keeps Python's garbage collector
from walking, in the step loop, over what was there before.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_loops = 0  # bodies under way, and what settled for good
GIB = 2**30


@contextmanager
def settled() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collections in the body.

    torch's own modules alone are some 300,000 objects. A full collection visits all of them (0.1 s
    on a Xeon), at another moment on each rank, and every rank waits for the slowest. After the
    outermost body everything is collected again, also what somebody else froze: from Python 3.12 on
    the interpreter freezes objects of its own, so `gc.get_freeze_count` cannot tell.
    """
    global _loops
    settle()
    try:
        yield
    finally:
        _loops -= 1
        if not _loops:
            gc.unfreeze()


def settle() -> None:
    """Exclude them until the process ends."""
    global _loops
    gc.collect()
    gc.freeze()
    _loops += 1


class StartUp:
    """Seconds of each part of a start, in order; the last is the first step, compiling included.
    `inside` has what parts consist of: building the engine, the first step, and how much of it all
    was compiling."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.inside: dict[str, dict[str, float]] = {}

    @classmethod
    def of_process(cls, launcher: int | None = None) -> StartUp:
        """Begin at the start of this process, or of the process `launcher`, where known."""
        start, own = cls(), _age(os.getpid())
        if own is None:
            return start
        before = _age(launcher) if launcher is not None else None
        if before is not None:
            start.seconds["launcher"] = round(before - own, 3)
        start.seconds["imports"] = round(own, 3)
        return start

    def done(self, part: str) -> None:
        """End `part` now; a part that ended before is left unchanged."""
        now = time.perf_counter()
        if part not in self.seconds:
            self.seconds[part] = round(now - self._last, 3)
        self._last = now

    def parted(self, part: str, inside: Mapping[str, float]) -> None:
        """End `part` now, with the seconds of its own parts."""
        self.done(part)
        self.inside[part] = {name: round(seconds, 3) for name, seconds in inside.items()}

    def facts(self) -> dict[str, float]:
        """Return the seconds for the summary."""
        found = dict(self.seconds)
        for part, inside in self.inside.items():
            found |= {f"{part}, {name}": seconds for name, seconds in inside.items()}
        return found

    def __str__(self) -> str:
        return "start-up: " + ", ".join(map(self._told, self.seconds))

    def _told(self, part: str) -> str:
        inside = ", ".join(f"{k} {s:.1f} s" for k, s in self.inside.get(part, {}).items())
        return f"{part} {self.seconds[part]:.1f} s" + (f" ({inside})" if inside else "")


def _age(pid: int) -> float | None:
    """Return the seconds since the process began; None where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    ticks = int(text.rpartition(")")[2].split()[19])  # field 22: after boot; a name may hold spaces
    return up - ticks / os.sysconf("SC_CLK_TCK")


def peak_gib(device: torch.device) -> list[float] | None:
    """Return the most GiB of tensors that each rank has held on its GPU; None on the CPU. Every
    rank of the default process group must call it."""
    if device.type != "cuda":
        return None
    return of_ranks(torch.cuda.max_memory_allocated(device) / GIB)


def retries(device: torch.device) -> int:
    """Return how often torch's allocator freed this process's unused memory before it got more:
    each time it waits for the device. 0 on the CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def crowded(found: list[int], steps: int) -> str | None:
    """Return a warning for many retries of each rank in `steps` steps; None for few."""
    most = max(found, default=0)
    if most < max(2, steps / 10):
        return None
    return (
        f"GPU memory was nearly full: in {steps} steps torch's allocator freed and reallocated "
        f"memory {most} times, and waited for the device each time. Use less memory: "
        "train.optimizer_state=bf16, model.checkpoint_activations=true or a smaller "
        "train.batch_size; zpp-lab plan lists what a GPU holds"
    )


def of_ranks(own: Any) -> list[Any]:
    """Return `own` of every rank of the process group, which all must call; or of this one."""
    if not dist.is_initialized():
        return [own]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every
