"""Where runs may go on this machine: its GPUs, or shares of its cores.

Without torch: GPUs are counted from CUDA_VISIBLE_DEVICES or the driver's device files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zpp_lab.config import Config
from zpp_lab.machine import cores, output

MIN_FRACTION = 1 / 16  # of a GPU: more runs than this side by side only get in each other's way
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Need:
    """What a run asks for: whole places (GPUs) of its own, or a fraction of one."""

    places: int = 1
    fraction: float = 1.0


@dataclass(frozen=True)
class Slot:
    """What a run has been given: CPU threads, and the GPUs it may see (None: as the parent)."""

    threads: int
    gpus: str | None = None
    places: tuple[int, ...] = ()
    fraction: float = 1.0

    def apply(self) -> None:
        """Limit this process to the slot's GPUs; must run before CUDA starts."""
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus


class Places:
    """The machine's places: one a GPU, or `jobs` shares of the cores where there is none."""

    def __init__(self, gpus: Sequence[str], jobs: int, threads: int) -> None:
        self.gpus, self.jobs, self.threads = list(gpus), jobs, threads
        self._used = [0.0] * (len(gpus) or jobs)
        self._running = 0

    def __len__(self) -> int:
        return len(self._used)

    def take(self, need: Need) -> Slot | None:
        """Room for `need`, the emptiest places first; None when it must wait."""
        count = need.places if self.gpus else min(need.places, len(self))
        fraction = need.fraction if self.gpus else 1.0
        room = [i for i, used in enumerate(self._used) if used + fraction <= 1 + _ROUNDING]
        if self._running >= self.jobs or len(room) < count:
            return None
        chosen = tuple(sorted(room, key=lambda i: self._used[i])[:count])
        for i in chosen:
            self._used[i] += fraction
        self._running += 1
        gpus = ",".join(self.gpus[i] for i in chosen) if self.gpus else None
        return Slot(self.threads, gpus, chosen, fraction)

    def give(self, slot: Slot) -> None:
        for i in slot.places:
            self._used[i] = max(0.0, self._used[i] - slot.fraction)
        self._running -= 1

    def shared(self, slot: Slot) -> bool:
        """Whether a run in `slot` has had less than a whole GPU."""
        return bool(self.gpus) and slot.fraction < 1


def make_places(jobs: int, runs_per_gpu: int, configs: Sequence[Config]) -> Places:
    """The places for these runs; `jobs` caps how many run side by side.

    jobs 0: as many as the GPUs take, or one a core without GPUs. runs_per_gpu 0: as many as
    memory takes. ValueError when a run needs more GPUs than the machine has.
    """
    check_jobs(jobs)
    gpus, cpus = visible_gpus(configs), cores()
    wanted = max((gpus_needed(config) for config in configs), default=1)
    if gpus and wanted > len(gpus):
        raise ValueError(
            f"a run of this study needs {wanted} GPUs (fsdp and deepspeed take one a rank), "
            f"and this machine has {len(gpus)}: use engine=virtual, a smaller cluster, or Slurm, "
            "or let nodes share GPUs with ++engine.share_gpus=mps"
        )
    if not gpus:
        jobs = jobs or cpus
        return Places([], jobs, max(1, cpus // jobs))
    most = len(gpus) * (runs_per_gpu or max(1, cpus // len(gpus)))
    return Places(gpus, jobs or most, max(1, cpus // (jobs or len(gpus) * max(1, runs_per_gpu))))


def check_jobs(jobs: int) -> None:
    """ValueError for a number of runs side by side that is none."""
    if jobs < 0:
        raise ValueError(f"jobs={jobs}: use 0 (as many as fit) or more")


def gpus_needed(config: Config) -> int:
    """One a rank; those of one node where all nodes share them."""
    cluster = config.cluster
    if not config.engine.ranked:
        return 1
    return cluster.gpus_per_node if config.engine.share_gpus is not None else cluster.world


def visible_gpus(configs: Sequence[Config]) -> list[str]:
    """GPUs to share out; none when a run names its device (cpu, cuda:1) itself."""
    if any(config.engine.device not in ("auto", "cuda") for config in configs):
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    nodes = [p.name for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    return [str(i) for i in range(len(nodes))]


def gpu_memory() -> int | None:
    """Memory of the smallest GPU in bytes, from the driver's tool; None when it does not tell."""
    text = output(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    sizes = [int(line) for line in (text or "").split() if line.isdigit()]
    return min(sizes) * 2**20 if sizes else None
