"""A queue of runs on this machine: which starts next and where, and how ended runs are settled.

Runs start in order; one that does not fit yet holds back those behind it. Every run is its own
process, so a crash ends nothing else. A fork server imports torch and the trainer once; a run then
starts in milliseconds.
"""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from zpp_lab.config.schema import Config
from zpp_lab.files import FAILURE, FULL, LOG, hold
from zpp_lab.runs.provenance import oom_kills
from zpp_lab.runs.reader import Run, last_step
from zpp_lab.study.run import attempts
from zpp_lab.study.run.attempts import ended_run, ending
from zpp_lab.study.run.places import Memory, Places, Slot
from zpp_lab.study.run.plan import PlannedRun
from zpp_lab.study.run.progress import Progress
from zpp_lab.train.time_slice import PAUSED, UNFINISHED

_GRACE = 10.0  # seconds that all runs get to end their step and write a checkpoint after SIGTERM
# What runs import once they train; torch's optimizers load the compiler.
_LATER = {
    "zpp_lab.train.launch.launcher": (
        "zpp_lab.train.trainer",
        "zpp_lab.engines.virtual.engine",
        "torch._dynamo",
    )
}


@dataclass(frozen=True)
class _Job:
    run: PlannedRun
    slot: Slot
    process: Any


@dataclass(frozen=True)
class Ended:
    """A process that ended. `code` −n: killed by signal n."""

    run: PlannedRun
    slot: Slot
    code: int


class Pool:
    """Processes for planned runs.

    entry: "module:function", called with the run's Config in the child; it returns the run's
    summary or outcome. until: unix time before which runs shall stop.
    """

    def __init__(self, entry: str, until: float | None = None) -> None:
        self._entry, self._until = entry, until
        self._jobs: list[_Job] = []
        self._context = multiprocessing.get_context("forkserver")
        module = entry.partition(":")[0]
        self._context.set_forkserver_preload([module, *_LATER.get(module, ())])

    @property
    def running(self) -> list[PlannedRun]:
        return [job.run for job in self._jobs]

    def start(self, run: PlannedRun, slot: Slot) -> None:
        run.dir.mkdir(parents=True, exist_ok=True)
        config = run.config
        if config.engine.threads == 0:
            config = replace(config, engine=replace(config.engine, threads=slot.threads))
        if self._until is not None:
            config = replace(config, run=replace(config.run, until=self._until))
        arguments = (self._entry, config, str(run.dir / LOG), slot)
        process = self._context.Process(target=_child, args=arguments, name=str(run))
        process.start()
        self._jobs.append(_Job(run, slot, process))

    def wait(self, seconds: float) -> list[Ended]:
        """Return the runs that ended within `seconds`."""
        ready = wait([job.process.sentinel for job in self._jobs], timeout=seconds)
        ended = [job for job in self._jobs if job.process.sentinel in ready]
        for job in ended:
            job.process.join()
            self._jobs.remove(job)
        return [Ended(job.run, job.slot, job.process.exitcode) for job in ended]

    def stop(self, grace: float = _GRACE) -> None:
        """End every running process: SIGTERM, then SIGKILL for what is left after `grace`."""
        for job in self._jobs:
            job.process.terminate()
        until = time.monotonic() + grace
        for job in self._jobs:
            job.process.join(max(0.0, until - time.monotonic()))
            if job.process.is_alive():
                job.process.kill()
                job.process.join()
        self._jobs.clear()


def _child(entry: str, config: Config, log: str, slot: Slot) -> None:
    """The body of a run's process: output to `log`, then the entry; exit 1 on an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    _end_with_parent()
    _send_output_to(log)
    slot.apply()
    held = hold(Path(log).parent)
    try:
        module, _, function = entry.partition(":")
        ended = getattr(importlib.import_module(module), function)(config)
        if ended and ended.get("outcome") == UNFINISHED:
            raise SystemExit(PAUSED)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code != PAUSED:
            traceback.print_exc()
        raise SystemExit(code if isinstance(code, int) else 1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        held.close()


def _end_with_parent() -> None:
    """Die when the study's process dies, so that a second start finds no run still writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _send_output_to(log: str) -> None:
    """Point the file descriptors 1 and 2 at `log`, for output from C code too."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):  # not in the locale's encoding
        own = os.fdopen(
            descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, own)


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
            why = "" if step else f"; {ended.run.dir / LOG} says why"
            self._progress.say(f"{ended.run}: stopped after step {step} of {steps}{why}")
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
            self._progress.say(f"{ended.run}: {ending(result)}; repeated at the end")
            return
        self.outcomes[ended.run.dir] = result.outcome
        self._progress.ended(ended.run, ending(result))

    def _worth_another(self, ended: Ended, result: Run) -> bool:
        """A run that was killed, or had too little memory, may fare better later."""
        if ended.run.dir in self._again or result.outcome in ("finished", "diverged"):
            return False
        return (
            ended.code < 0
            or result.outcome == "unfinished"
            or (result.outcome == "out_of_memory" and self._places.shared(ended.slot))
        )


def _check_disk(folder: Path, result: Run) -> None:
    """Stop when a disk, or a user's share of it, is full: every further run would fail."""
    failure = result.failure or {}
    error = str(failure.get("error") or "").strip()
    free = shutil.disk_usage(folder).free
    if free < _FULL or any(why in f"{error} {failure.get('traceback')}" for why in _NO_ROOM):
        (folder / FAILURE).unlink(missing_ok=True)
        text = f": {error.splitlines()[0].partition('; ')[0]}" if error else ""
        raise OSError(
            errno.ENOSPC,
            f"{folder}: the disk is full ({free / 2**20:.0f} MiB left{text}); free some space, "
            "then the same command resumes each run from its last checkpoint",
        )


class Stop:
    """Whether a signal asked for the end. A plain flag: a second signal may come at any moment,
    inside this handler too, where a lock would wait for itself."""

    requested = False

    def request(self, *_: object) -> None:
        self.requested = True


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yield notes SIGINT and SIGTERM; the old handlers come back at the end."""
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
