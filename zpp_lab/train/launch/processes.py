"""Every process of an emulated cluster carries its owner's mark, so none outlives the owner.

The mark is an environment variable, which children inherit: the owner's process id and the time
at which it started, since ids are used again. A namespace lives as long as its processes do, so
ending them removes links and limits too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ZPP_LAB_NODES_OWNER"
PROC = Path("/proc")


def mark(pid: int | None = None) -> str:
    """Return the mark of processes of the owner `pid` (default: this one)."""
    pid = pid or os.getpid()
    return f"{pid}:{_started(pid)}"


def alive(owner: str) -> bool:
    """Return whether the process that made the mark still runs."""
    pid, _, started = owner.partition(":")
    return pid.isdigit() and started != "" and _started(int(pid)) == started


def marked(wanted: Callable[[str], bool], variable: str = VARIABLE) -> list[int]:
    """Return processes other than this one whose mark `wanted` accepts; `variable` has the mark."""
    found = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        owner = _owner(folder, variable)
        if owner and wanted(owner) and _started(int(folder.name)):
            found.append(int(folder.name))
    return found


def end(
    wanted: Callable[[str], bool], patience: float = 60.0, variable: str = VARIABLE
) -> list[int]:
    """Kill the processes whose mark `wanted` accepts, and wait until they are gone. Returns those
    that were found. RuntimeError names the ones that do not die."""
    ended: list[int] = []
    deadline = time.monotonic() + patience
    while left := marked(wanted, variable):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended += [pid for pid in left if pid not in ended]
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} of an emulated cluster have not ended: kill them")
        time.sleep(0.02)
    return ended


def end_orphans(variable: str = VARIABLE) -> list[int]:
    """End the processes of owners that are gone."""
    return end(lambda owner: not alive(owner), variable=variable)


def _owner(folder: Path, variable: str) -> str:
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return ""
    prefix = variable.encode() + b"="
    return next((v[len(prefix) :].decode() for v in variables if v.startswith(prefix)), "")


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty when it is gone or a zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class EmulationError(ValueError):
    """This machine cannot make emulated nodes; says what it lacks."""
