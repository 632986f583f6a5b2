"""How much of a GPU a run takes, so that several small ones can share it.

With `runs_per_gpu: 0` the first run of a shape (model, cluster, batch, dtypes, recipe family) has
a GPU to itself; its peak memory then says how many of its kind fit beside each other.
"""

from __future__ import annotations

import json
import os

from zpp_lab.config import Config
from zpp_lab.emulate.mps import PROGRAM
from zpp_lab.runconfig import flat_config
from zpp_lab.study.attempts import ran_out_of_memory
from zpp_lab.study.plan import PlannedRun
from zpp_lab.study.runs import Run, read_run
from zpp_lab.study.slots import MIN_FRACTION, Need, gpu_memory, gpus_needed

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


def shape(config: Config) -> str:
    """What decides a run's memory and seconds a step, as one text: model, cluster, batch, dtypes,
    engine, and whether weights and gradients have codecs."""
    flat = flat_config(config)
    names = [*_SHAPE, *(f"train.{name}" for name in _SHAPE_TRAIN)]
    kept = {
        key: value
        for key, value in flat.items()
        if any(key == name or key.startswith(f"{name}.") for name in names)
    }
    kept |= {"weights": _coded(flat, "weights"), "grads": _coded(flat, "grads")}
    return json.dumps(kept, sort_keys=True, default=str)


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
        """A peak measured elsewhere, in bytes, for a shape."""
        if peak:
            self._peaks[key] = max(int(peak), self._peaks.get(key, 0))

    def need(self, run: PlannedRun) -> Need:
        """Whole GPUs for a run that ran out of memory before, and for one of several processes: in
        time slices NCCL's kernels would wait each other out. Under MPS they do not."""
        gpus = gpus_needed(run.config)
        if ran_out_of_memory(run.dir) or (gpus > 1 and PROGRAM not in os.environ):
            return Need(gpus)
        if self._per_gpu:
            return Need(gpus, 1 / self._per_gpu)
        peak = self._peaks.get(shape(run.config))
        if peak is None or self._total is None:
            return Need(gpus)
        ranks = run.config.cluster.world // gpus if run.config.engine.ranked else 1
        taken = ranks * (peak * _SPARE + _CONTEXT) / self._total  # the peak is one rank's
        return Need(gpus, min(1.0, max(MIN_FRACTION, taken)))
