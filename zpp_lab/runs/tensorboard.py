"""A run's series as TensorBoard's event files: those that wandb gets, under the same names.

They lie in `tensorboard/` of the run's folder. A start that goes on hides what an earlier one wrote
of the steps that it makes again.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from zpp_lab.runs.metrics import Record
from zpp_lab.runs.wandb.baseline import Baseline, find_baseline
from zpp_lab.runs.wandb.folder import RunFolder
from zpp_lab.runs.wandb.identity import outcome_values, results, row

FOLDER = "tensorboard"
Counts = tuple[Sequence[float], Sequence[float]]  # of a histogram, with its edges


def check_installed() -> None:
    """Raise ValueError where the package is absent."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tracking.tensorboard=true needs the tensorboard package: run "
            "`pip install 'zpp_lab[tensorboard]'`, or leave it out"
        )


class EventFiles:
    """Writes the steps after `done` of the run in `folder`, whose config.yaml is there."""

    def __init__(self, folder: Path, done: int) -> None:
        check_installed()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=done + 1)
        self._run, self._baseline = RunFolder(folder), cast(Baseline | None, None)
        self._step = done
        self._waiting: deque[Record] = deque()  # for the baseline's loss at their step

    def log(self, record: Record) -> None:
        self._step = record["step"]
        self._write(row(record, counted=_same, spread=_spread), self._step)
        self._waiting.append(record)
        self._write_gaps()

    def close(self, outcome: Mapping[str, Any] | None = None) -> None:
        """End the files with `outcome` as wandb's run has it, below final/."""
        self._write_gaps()
        if outcome is not None:
            last = {**results(outcome, counted=_same), **outcome_values(outcome, self._found())}
            self._write(last, self._step)
        self._writer.close()

    def _found(self) -> Baseline | None:
        if self._baseline is None:
            self._baseline = find_baseline(self._run)
        return self._baseline

    def _write_gaps(self) -> None:
        """In the order of steps, as far as the baseline is known."""
        baseline = self._found()
        if baseline is None:
            return
        baseline.refresh()
        while self._waiting and (gap := baseline.gap(self._waiting[0])) is not None:
            self._write(gap, self._waiting.popleft()["step"])

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, tuple):
                self._histogram(name, value, step)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _histogram(self, name: str, value: Counts, step: int) -> None:
        """Moments are of the bins' middles: a histogram has no others."""
        counts, edges = (np.asarray(part, dtype=float) for part in value)
        if not counts.sum() or not np.isfinite(edges).all():
            return
        middles = (edges[1:] + edges[:-1]) / 2
        self._writer.add_histogram_raw(
            name,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float((counts * middles).sum()),
            sum_squares=float((counts * middles**2).sum()),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )


def _same(counts: Sequence[float], edges: Sequence[float]) -> Counts:
    return counts, edges


def _spread(values: Sequence[float]) -> Counts:
    counts, edges = np.histogram(values, bins=min(32, 4 * len(values)))
    return counts.tolist(), edges.tolist()
