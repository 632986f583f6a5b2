"""`train.profile=10:13`: what these steps did, as a trace and, on a GPU, a memory snapshot.

Each rank writes its own into `profile/` of the run's folder: `rank0.json` for Perfetto or
chrome://tracing, `rank0.pickle` for pytorch.org/memory_viz. No bit of training changes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

FOLDER = "profile"
ENTRIES = 200_000  # of the snapshot's history: the newest allocations and frees


class Profile:
    """Bracket each step by `before` and `after`; leaving the body ends what is under way."""

    def __init__(self, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        self.steps, self.rank, self.device = steps, rank, device
        self.folder = folder / FOLDER
        self._profiler: profile | None = None
        self._mark: record_function | None = None
        self._first = self._last = 0

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is not None:
            self._stop()

    def before(self, step: int) -> None:
        if step not in self.steps:
            return
        if self._profiler is None:
            self._start(step)
        self._mark = record_function(f"step {step}")
        self._mark.__enter__()

    def after(self, step: int) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark, self._last = None, step
        if self._profiler is not None and step == self.steps[-1]:
            self._stop()

    def _start(self, step: int) -> None:
        self._first = step
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        self._profiler = profile(activities=activities, profile_memory=True)
        self._profiler.start()

    def _stop(self) -> None:
        """Write what was seen. A disk that cannot take it ends no training."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        on_gpu, missing = self.device.type == "cuda", "; memory snapshots need a GPU"
        try:
            profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"rank{self.rank}.json"))
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"rank{self.rank}.pickle"))
        except (OSError, RuntimeError) as error:
            print(f"rank {self.rank}: no profile: {error}", file=sys.stderr, flush=True)
            return
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        if self.rank == 0:
            note = f"profile of steps {self._first} to {self._last}: {self.folder}"
            print(f"{note}{'' if on_gpu else missing}", flush=True)
