"""What a study prints while it runs: a line for each run that ends, and a live line with ETA."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from zpp_lab.study.plan import PlannedRun
from zpp_lab.study.runs import last_step


class Progress:
    """Counts runs and steps. The live line appears on a terminal only."""

    def __init__(self, total: int, todo: Sequence[PlannedRun], stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._total, self._ended = total, total - len(todo)
        self._begun = {run.dir: last_step(run.dir) for run in todo}  # resumed runs start late
        self._steps = sum(run.config.train.steps - self._begun[run.dir] for run in todo)
        self._done = 0
        self._start = time.monotonic()

    def add(self, runs: Sequence[PlannedRun]) -> None:
        """Runs that were decided on later."""
        self._total += len(runs)
        self._begun |= {run.dir: last_step(run.dir) for run in runs}
        self._steps += sum(run.config.train.steps - self._begun[run.dir] for run in runs)

    def ended(self, run: PlannedRun, text: str) -> None:
        self._ended += 1
        self._done += run.config.train.steps - self._begun[run.dir]
        width = len(str(self._total))
        self.say(f"[{self._ended:{width}}/{self._total}] {run}: {text}")

    def say(self, text: str) -> None:
        self._stream.write(f"{_CLEAR if self._live else ''}{text}\n")
        self._stream.flush()

    def update(self, running: Sequence[PlannedRun]) -> None:
        """Rewrite the live line from the running runs' last steps."""
        if not self._live or not running:
            return
        steps = [(run, last_step(run.dir)) for run in running]
        done = self._done + sum(max(0, step - self._begun[run.dir]) for run, step in steps)
        left = duration(self._remaining(done))
        now = ", ".join(f"{run} {step}/{run.config.train.steps}" for run, step in steps)
        line = f"{self._ended}/{self._total} runs, {left} left: {now}"
        self._stream.write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def close(self) -> None:
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _remaining(self, done: int) -> float | None:
        elapsed = time.monotonic() - self._start
        return elapsed / done * max(0, self._steps - done) if done else None


_CLEAR = "\r\x1b[K"


def duration(seconds: float | None) -> str:
    """4:05 or 1:04:05; ? when it is not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
