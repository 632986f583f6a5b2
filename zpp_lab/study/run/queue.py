"""One queue of runs over this machine: who starts next and where, and what becomes of who ends.

Runs start in order. One that does not fit yet holds back those behind it, so that a run which
needs all GPUs comes to its turn.

A study's prepared runs go through the same queue. Its arms wait for them, and their folder is no
arm's.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from zpp_lab.files import FAILURE, FULL
from zpp_lab.runs.provenance import oom_kills
from zpp_lab.runs.reader import Run, last_step
from zpp_lab.study.run import attempts
from zpp_lab.study.run.attempts import ended_run, ending
from zpp_lab.study.run.places import Memory, Places
from zpp_lab.study.run.plan import PlannedRun
from zpp_lab.study.run.pool import Ended, Pool
from zpp_lab.study.run.progress import Progress
from zpp_lab.train.piece import PAUSED, UNFINISHED

_POLL = 0.5  # seconds between looks at the running processes
_FULL = 8 * 2**20  # bytes left at which a disk counts as full
_NO_ROOM = tuple(os.strerror(number) for number in FULL)  # as runs say it


class Queue:
    """Runs processes on `places` until nothing waits; `outcomes` maps a run's folder to how it
    ended: finished, diverged, out_of_memory, crashed, or unfinished.

    until: unix time; none starts after it, and those that run stop before it with a checkpoint.
    """

    def __init__(
        self,
        entry: str,
        places: Places,
        memory: Memory,
        progress: Progress,
        until: float | None = None,
    ) -> None:
        self._pool, self._places, self._until = Pool(entry, until), places, until
        self._memory, self._progress = memory, progress
        self._waiting: deque[PlannedRun] = deque()
        self._again: set[Path] = set()  # started twice in this call
        self.outcomes: dict[Path, str] = {}

    def run(self, todo: Iterable[PlannedRun], stop: Stop) -> None:
        """Run all of `todo`; returns early when `stop` is requested.

        OSError when the disk is full; what ran has been stopped then and goes on later.
        """
        self._waiting.extend(todo)
        kills = oom_kills()
        try:
            while (self._waiting or self._pool.running) and not stop.requested:
                if self._until is not None and time.time() >= self._until:
                    self._waiting.clear()
                self._start()
                for ended in self._pool.wait(_POLL):
                    self._places.give(ended.slot)
                    if not stop.requested or ended.run.finished:
                        self._settle(ended, oom_kills() > kills)
                    kills = oom_kills()
                self._progress.update(self._pool.running)
        finally:
            self._pool.stop()
            self._progress.close()

    def _start(self) -> None:
        while self._waiting:
            slot = self._places.take(self._memory.need(self._waiting[0]))
            if slot is None:
                return
            run = self._waiting.popleft()
            (run.dir / FAILURE).unlink(missing_ok=True)
            self._pool.start(run, slot)

    def _settle(self, ended: Ended, out_of_memory: bool) -> None:
        if ended.code == PAUSED:
            self._waiting.clear()  # what starts now would stop before its first step
            self.outcomes[ended.run.dir] = UNFINISHED
            step, steps = last_step(ended.run.dir), ended.run.config.train.steps
            self._progress.say(f"{ended.run}: stopped after step {step} of {steps}")
            return
        result = ended_run(ended.run, ended.code, out_of_memory)
        if result.outcome == "finished":
            self._memory.learn(ended.run, result)
        else:
            _check_disk(ended.run.dir, result)
            attempts.note(ended.run.dir, result.failure or {"outcome": result.outcome})
        if self._worth_another(ended, result):
            self._again.add(ended.run.dir)
            self._waiting.append(ended.run)
            self._progress.say(f"{ended.run}: {ending(result)}; tried again at the end")
            return
        self.outcomes[ended.run.dir] = result.outcome
        self._progress.ended(ended.run, ending(result))

    def _worth_another(self, ended: Ended, result: Run) -> bool:
        """A run that was killed, or had no memory beside others, may fare better later."""
        if ended.run.dir in self._again or result.outcome in ("finished", "diverged"):
            return False
        return (
            ended.code < 0
            or result.outcome == "unfinished"
            or (result.outcome == "out_of_memory" and self._places.shared(ended.slot))
        )


def _check_disk(folder: Path, result: Run) -> None:
    """A full disk, or a user's full share of it, fails every run after the first: better stop and
    say so."""
    failure = result.failure or {}
    error = str(failure.get("error") or "").strip()
    free = shutil.disk_usage(folder).free
    if free < _FULL or any(why in f"{error} {failure.get('traceback')}" for why in _NO_ROOM):
        (folder / FAILURE).unlink(missing_ok=True)
        told = f": {error.splitlines()[0].partition('; ')[0]}" if error else ""
        raise OSError(
            errno.ENOSPC,
            f"{folder}: the disk is full ({free / 2**20:.0f} MiB left{told}); make room, then the "
            "same command goes on, each run from its last checkpoint",
        )


class Stop:
    """Whether a signal asked for the end. A plain flag: a second signal may come at any moment,
    inside this handler too, where a lock would wait for itself."""

    requested = False

    def request(self, *_: object) -> None:
        self.requested = True


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Notes SIGINT and SIGTERM; the old handlers come back at the end."""
    stop = Stop()
    old: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, stop.request)
    try:
        yield stop
    finally:
        _restore(old)


def _restore(handlers: Mapping[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
