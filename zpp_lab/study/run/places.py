"""Where runs may go on this machine: its GPUs, parts of a GPU, or shares of its cores.

Several small runs may share a GPU. With `runs_per_gpu: 0` the first run of a shape (model, cluster,
batch, dtypes, recipe family) has a GPU to itself; its peak memory then says how many of its kind
fit in parallel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from zpp_lab.config.flat import flat_config
from zpp_lab.config.schema import Config
from zpp_lab.runs.provenance import cores, gpu_memory
from zpp_lab.runs.reader import Run, read_run
from zpp_lab.study.run.attempts import attempts
from zpp_lab.study.run.plan import PlannedRun
from zpp_lab.train.launch.gpus import visible_gpus
from zpp_lab.train.launch.mps import PROGRAM

_SPARE = 1.15  # of the measured peak: allocators are not alike twice
_CONTEXT = 2**30  # bytes of a process on a GPU beside its tensors
_SHAPE = (
    "model",
    "data.seq_len",
    "data.tokenizer",
    "data.vocab_size",
    "data.tokenizer_path",
    "cluster",
    "engine",
    "ops",
)
_SHAPE_TRAIN = (
    "batch_size",
    "micro_steps",
    "accumulate",
    "param_dtype",
    "reduce_dtype",
    "optimizer_state",
)
MIN_FRACTION = 1 / 16  # of a GPU: more runs than this side by side only get in each other's way
_ROUNDING = 1e-9


def shape(config: Config) -> str:
    """Return what decides a run's memory and seconds a step, as one text: model, cluster, batch,
    dtypes, engine, and whether weights and gradients have codecs."""
    flat = flat_config(config)
    names = [*_SHAPE, *(f"train.{name}" for name in _SHAPE_TRAIN)]
    chosen = {
        key: value
        for key, value in flat.items()
        if any(key == name or key.startswith(f"{name}.") for name in names)
    }
    chosen |= {"weights": _coded(flat, "weights"), "grads": _coded(flat, "grads")}
    return json.dumps(chosen, sort_keys=True, default=str)


def _coded(flat: dict[str, object], kind: str) -> bool:
    return any(
        value is not None
        for key, value in flat.items()
        if key.startswith(f"recipe.{kind}") and key.endswith((".bits", ".codec"))
    )


class Memory:
    """Needs of runs; learns from runs that finished."""

    def __init__(self, runs_per_gpu: int, total: int | None = None) -> None:
        """total: bytes of a GPU, asked from the driver where None; only for runs_per_gpu=0."""
        self._per_gpu = runs_per_gpu
        self._total = total if runs_per_gpu or total else gpu_memory()
        self._peaks: dict[str, int] = {}

    def learn(self, run: PlannedRun, result: Run | None = None) -> None:
        """Note a finished run's peak memory, where it was measured on a GPU."""
        result = result or read_run(run.dir)
        peak = (result.summary or {}).get("peak_memory_bytes")
        self.know(shape(run.config), peak)

    def know(self, key: str, peak: int | None) -> None:
        """Note a peak measured elsewhere, in bytes, for a shape."""
        if peak:
            self._peaks[key] = max(int(peak), self._peaks.get(key, 0))

    def need(self, run: PlannedRun) -> Need:
        """Return whole GPUs for a run that ran out of memory before, and for one of several
        processes: in time slices NCCL's kernels would wait each other out. Under MPS they do
        not."""
        gpus = gpus_needed(run.config)
        last = (attempts(run.dir) or [{}])[-1].get("outcome")
        if last == "out_of_memory" or (gpus > 1 and PROGRAM not in os.environ):
            return Need(gpus)
        if self._per_gpu:
            return Need(gpus, 1 / self._per_gpu)
        peak = self._peaks.get(shape(run.config))
        if peak is None or self._total is None:
            return Need(gpus)
        ranks = run.config.cluster.world // gpus if run.config.engine.ranked else 1
        taken = ranks * (peak * _SPARE + _CONTEXT) / self._total  # the peak is one rank's
        return Need(gpus, min(1.0, max(MIN_FRACTION, taken)))


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
        """Return room for `need`, the emptiest places first; None when it must wait."""
        count = need.places if self.gpus else min(need.places, len(self))
        fraction = need.fraction if self.gpus else 1.0
        left = [i for i, used in enumerate(self._used) if used + fraction <= 1 + _ROUNDING]
        if self._running >= self.jobs or len(left) < count:
            return None
        chosen = tuple(sorted(left, key=lambda i: self._used[i])[:count])
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
        """Return whether a run in `slot` has had less than a whole GPU."""
        return bool(self.gpus) and slot.fraction < 1


def make_places(jobs: int, runs_per_gpu: int, configs: Sequence[Config]) -> Places:
    """Return the places for these runs; `jobs` caps how many run side by side.

    jobs 0: as many as the GPUs take, or one a core without GPUs. runs_per_gpu 0: as many as
    memory takes. ValueError when a run needs more GPUs than the machine has.
    """
    check_jobs(jobs)
    gpus, cpus = gpus_to_share(configs), cores()
    wanted = max((gpus_needed(config) for config in configs), default=1)
    if gpus and wanted > len(gpus):
        raise ValueError(
            f"a run of this study needs {wanted} GPUs (fsdp and deepspeed need one a rank), and "
            f"this machine has {len(gpus)}: use engine=virtual, a smaller cluster, or Slurm, or "
            "let nodes share GPUs with engine.share_gpus=mps"
        )
    if not gpus:
        jobs = jobs or cpus
        return Places([], jobs, max(1, cpus // jobs))
    most = len(gpus) * (runs_per_gpu or max(1, cpus // len(gpus)))
    return Places(gpus, jobs or most, max(1, cpus // (jobs or len(gpus) * max(1, runs_per_gpu))))


def check_jobs(jobs: int) -> None:
    """Raise ValueError for a number of runs side by side that is none."""
    if jobs < 0:
        raise ValueError(f"jobs={jobs}: use 0 (as many as fit) or more")


def gpus_needed(config: Config) -> int:
    """Return one a rank; those of one node where all nodes share them."""
    cluster = config.cluster
    if not config.engine.ranked:
        return 1
    return cluster.gpus_per_node if config.engine.share_gpus is not None else cluster.world


def gpus_to_share(configs: Sequence[Config]) -> list[str]:
    """Return the GPUs to share out; none when a run names its device (cpu, cuda:1) itself."""
    if any(config.engine.device not in ("auto", "cuda") for config in configs):
        return []
    return list(visible_gpus(os.environ))
