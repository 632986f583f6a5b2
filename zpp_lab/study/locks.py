"""Who is at work in a folder: a lock that the kernel lets go when its process dies.

A study holds its folder and a run's process the run's, so that nothing runs twice and another
terminal sees what is running without a word from the process.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

FILE = ".lock"


def hold(folder: Path) -> IO[str]:
    """Lock `folder` until the file that is returned is closed, waiting for who has it now."""
    file = open(folder / FILE, "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextmanager
def _alone(folder: Path, otherwise: str) -> Iterator[None]:
    """Hold `folder`. ValueError, `otherwise`, when another process has it."""
    with open(folder / FILE, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: {otherwise}") from None
        yield


def at_work(folder: Path) -> AbstractContextManager[None]:
    """Hold a run's folder, made where it is not there. ValueError when another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    otherwise = "a run is at work here already; wait for it or stop it, or give another run.dir"
    return _alone(folder, otherwise)


def only_one(root: Path) -> AbstractContextManager[None]:
    """Hold a study's folder, so that two calls never run the same runs at the same time."""
    otherwise = "a study is running here already; look at it with --watch, wait for it or stop it"
    return _alone(root, otherwise)


def held(folder: Path) -> bool:
    """Whether a living process holds `folder`."""
    try:
        file = open(folder / FILE)  # noqa: SIM115
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
