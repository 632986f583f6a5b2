"""Who is at work in a folder: a lock that the kernel lets go when its process dies.

A study holds its folder and a run's process the run's (of several ranks, whoever started them:
one process for all), so that nothing runs twice and another terminal sees what is running
without a word from the process.

Some file systems have no such locks (Lustre unless mounted with flock, NFS without its lock
service). Work goes on there, after a line that says what is lost.
"""

from __future__ import annotations

import errno
import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FILE = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_GLANCE = 0.5  # seconds; `held` of another process has the lock for a moment
_LOOK = 0.05  # seconds between two attempts


def hold(folder: Path) -> IO[str]:
    """Lock `folder` until the file that is returned is closed, waiting for who has it now, after a
    line that says so."""
    file = _opened(folder)
    if not _taken_within(file, _GLANCE):
        told = f"{folder}: another process is at work here; this one begins when that has ended"
        print(told, file=sys.stderr, flush=True)
        _taken(file, fcntl.LOCK_EX)
    return file


@contextmanager
def _alone(folder: Path, otherwise: str, patience: float = 0.0) -> Iterator[None]:
    """Hold `folder`. ValueError, `otherwise`, when another process has it all the time."""
    with _opened(folder) as file:
        if not _taken_within(file, max(patience, _GLANCE)):
            raise ValueError(f"{folder}: {otherwise}")
        yield


def _taken_within(file: IO[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not _taken(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def _opened(folder: Path) -> IO[str]:
    return open(folder / FILE, "w")


def _taken(file: IO[str], how: int) -> bool:
    """Whether this process has the lock now, or there are none. OSError names the file."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, error.strerror, file.name) from error
        print(
            f"{file.name}: no locks on this file system ({error.strerror}): nothing keeps a second "
            "start out of this folder, and reports cannot tell that this one is running",
            file=sys.stderr,
        )
    return True


@contextmanager
def at_work(folder: Path, patience: float = 0.0, more: str = "") -> Iterator[None]:
    """Hold a run's folder, made where it is not there, and gone again where a mistake (ValueError,
    OSError) came before the run. ValueError, which ends with `more`, when another process has it,
    and still has it after `patience` seconds."""
    otherwise = "a run is at work here already; wait for it or stop it, or give another run.dir"
    with _made(folder), _alone(folder, otherwise + more, patience):
        yield


@contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Hold a study's folder, so that two calls never run the same runs at the same time; made, and
    gone again, as of `at_work`."""
    otherwise = "a study is running here already; look at it with --watch, wait for it or stop it"
    with _made(root), _alone(root, otherwise):
        yield


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """`folder`, made where it is not there. A mistake that ends the body takes it away again as
    long as it tells of nothing but the mistake."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except (ValueError, OSError):
        names = {path.name for path in folder.iterdir()}
        if new and names <= {FILE, "failure.json"}:
            for name in names:
                (folder / name).unlink()
            for path in new:
                path.rmdir()
        raise


def held(folder: Path) -> bool:
    """Whether a living process holds `folder`; False where the file system has no locks."""
    try:
        file = open(folder / FILE)  # noqa: SIM115
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise OSError(error.errno, error.strerror, file.name) from error
        return False
