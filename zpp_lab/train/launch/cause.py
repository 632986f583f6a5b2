"""Errors as they are reported: a user's mistake in one line, and among failed ranks the first
cause.

A rank's end makes the others fail too, often before anyone has looked. The time of a failure does
not decide, as torch keeps it in whole seconds, and for a killed process only the time at which it
was found. A rank's last message does: whether it lost its peers, or had a reason of its own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from zpp_lab.files import missing

USER_ERROR = 2  # exit code of a rank that met a user's mistake
SILENT = "has sent no heartbeat for"  # begins what is said of a rank that stands still
_ENDED_BY_OTHERS = (-6, -15)  # SIGABRT: a library gave up on its peers; SIGTERM: the launcher
_LOST = (
    "CollectiveError",  # ours: names the wire and the unit
    "LostRank",  # ours: names the rank
    "Timed out waiting",  # gloo
    "closed by peer",  # gloo
    "reset by peer",
    "remote worker",
    "Broken pipe",
    "DistNetworkError",  # the store of rank 0
    "remote process exited",  # NCCL
    "Watchdog caught collective operation timeout",
)
_CHECK = "; check the path, and that its folder can be written"
_ROOM = "free some space, then run the same command again to resume"
_WRITABLE = "use a place that you may read and write, or change its permissions"
_FIXES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: f"a file exceeds the size limit (ulimit -f): raise the limit or {_ROOM}",
    errno.ENOTDIR: "a part of this path is a file: use another path",
    errno.EEXIST: "a file of that name exists: use another name, or delete it",
    errno.EISDIR: "this is a folder: use a file",
    errno.ELOOP: "a link there points to itself: use another path",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOENT: "check the path, and that its folder exists",
}
_GONE = (ConnectionError, TimeoutError)  # the other side, for a reason of its own
FULL_MEMORY = (
    "memory is full: use a smaller model, batch or cluster, or a machine with more memory "
    "(`zpp-lab plan` lists what each rank holds)"
)


def mistake(error: BaseException) -> str | None:
    """Return what a user can fix, in one line that names the fix; None for other errors."""
    if isinstance(error, OSError):
        return None if isinstance(error, _GONE) else _of_system(error)
    if not isinstance(error, ValueError):
        return None
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(str(one.get("ctx", {}).get("error", one["msg"])) for one in error.errors())


def memory_is_full(error: BaseException) -> bool:
    """Return whether a tensor did not fit, on a GPU or in the machine's memory."""
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _of_system(error: OSError) -> str:
    """Return the file and what is wrong with it, without Python's error number."""
    if error.strerror is None:
        text = str(error)
        unnamed = os.strerror(errno.EFBIG) in text and "ulimit" not in text
        return f"{text}; {_FIXES[errno.EFBIG]}" if unnamed else text
    text = error.strerror[:1].lower() + error.strerror[1:]
    if error.filename is not None:
        text = f"{error.filename}: {text}"
    if isinstance(error.filename, str) and error.errno == errno.ENOENT:
        return f"{error.filename}: {missing(Path(error.filename), 'file or folder')}{_CHECK}"
    fix = _FIXES.get(error.errno or 0, "")
    has_fix = error.filename is None and "; " in text  # whoever raised it has named one
    if error.errno == errno.EFBIG and "ulimit" not in text:
        has_fix = False  # which looks like a full disk to most
    return text if has_fix or not fix else f"{text}; {fix}"


class Failure(Protocol):
    """What torch's launcher knows of a rank that failed."""

    exitcode: int
    timestamp: int
    message: object


FailureT = TypeVar("FailureT", bound=Failure)


def first_cause(failures: Mapping[int, FailureT]) -> tuple[int, FailureT]:
    """Return the rank whose end explains the others', and its failure. A user's mistake comes
    before what a rank met on its own (its exception, or the signal that killed it), and that before
    the loss of a peer; then the earlier, then the lower rank. Where a rank has reported silent
    ones, the launcher killed those that did not end."""
    assert failures
    notes = [f.message for f in failures.values() if isinstance(f.message, Mapping)]
    silent = any(str(note.get("why")).startswith(SILENT) for note in notes)

    def order(item: tuple[int, FailureT]) -> tuple[int, int, int]:
        rank, failure = item
        kind, when = _order(failure)
        return (3 if silent and failure.exitcode == -9 else kind), when, rank

    return min(failures.items(), key=order)


def lost_a_peer(text: str) -> bool:
    """Return whether a rank's last message only says that another one is gone."""
    return any(words in text for words in _LOST)


def _order(failure: Failure) -> tuple[int, int]:
    if failure.exitcode == USER_ERROR:
        return 0, failure.timestamp
    lost = failure.exitcode in _ENDED_BY_OTHERS or lost_a_peer(str(failure.message))
    return (2 if lost else 1), failure.timestamp
