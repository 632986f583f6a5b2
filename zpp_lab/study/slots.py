"""How many runs fit side by side on this machine, and what each of them gets.

Without torch: GPUs are counted from CUDA_VISIBLE_DEVICES or the driver's device files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zpp_lab.config import Config
from zpp_lab.machine import cores


@dataclass(frozen=True)
class Slot:
    """A place for one run: CPU threads, and the GPUs it may see (None: as the parent)."""

    threads: int
    gpus: str | None = None

    def apply(self) -> None:
        """Limit this process to the slot's GPUs; must run before CUDA starts."""
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus


def make_slots(jobs: int, configs: Sequence[Config]) -> list[Slot]:
    """`jobs` slots; 0 makes one a GPU, or one a core on a machine without GPUs."""
    if jobs < 0:
        raise ValueError(f"jobs={jobs}: use 0 (as many as fit) or more")
    gpus, cpus = visible_gpus(configs), cores()
    jobs = jobs or len(gpus) or cpus
    threads = max(1, cpus // jobs)
    if jobs == 1 or not gpus:
        return [Slot(threads)] * jobs
    share = max(1, len(gpus) // jobs)
    starts = [i * share % len(gpus) for i in range(jobs)]
    return [Slot(threads, ",".join(gpus[s : s + share])) for s in starts]


def visible_gpus(configs: Sequence[Config]) -> list[str]:
    """GPUs to share out; none when a run names its device (cpu, cuda:1) itself."""
    if any(config.engine.device not in ("auto", "cuda") for config in configs):
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    nodes = [p.name for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    return [str(i) for i in range(len(nodes))]
