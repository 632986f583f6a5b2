"""Runs as processes, some side by side, each started from a server that has torch imported.

Every run is its own process, so a crash takes nothing else with it. The fork server
imports the trainer once; a run then starts in milliseconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from zpp_lab.config.schema import Config
from zpp_lab.files import LOG, hold
from zpp_lab.study.run.places import Slot
from zpp_lab.study.run.plan import PlannedRun
from zpp_lab.train.piece import PAUSED, UNFINISHED

_GRACE = 10.0  # seconds a run gets to end after SIGTERM
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
        """The runs that ended within `seconds`."""
        ready = wait([job.process.sentinel for job in self._jobs], timeout=seconds)
        ended = [job for job in self._jobs if job.process.sentinel in ready]
        for job in ended:
            job.process.join()
            self._jobs.remove(job)
        return [Ended(job.run, job.slot, job.process.exitcode) for job in ended]

    def stop(self) -> None:
        """End every running process: SIGTERM, then SIGKILL for what is left."""
        for job in self._jobs:
            job.process.terminate()
        for job in self._jobs:
            job.process.join(_GRACE)
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
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
