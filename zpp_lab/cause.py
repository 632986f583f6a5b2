"""Which rank ended the run: its end makes the others fail too, often before anyone has looked.

The time of a failure does not tell, as torch keeps it in whole seconds, and of a killed process
has only the time at which it was found. What a rank says of its end does: whether it lost its
peers, or had a reason of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

USER_ERROR = 2  # exit code of a rank that met a user's mistake
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


class Failure(Protocol):
    """What torch's launcher knows of a rank that failed."""

    exitcode: int
    timestamp: int
    message: object


FailureT = TypeVar("FailureT", bound=Failure)


def first_cause(failures: Mapping[int, FailureT]) -> tuple[int, FailureT]:
    """The rank whose end explains the others', and its failure.

    A user's mistake comes before what a rank met on its own (its exception, or the signal that
    killed it), and that before the loss of a peer; then the earlier, then the lower rank. A rank
    that others found silent was killed for it.
    """
    assert failures
    notes = [f.message for f in failures.values() if isinstance(f.message, Mapping)]
    silent = [note.get("lost") for note in notes if str(note.get("why")).startswith("is silent")]

    def order(item: tuple[int, FailureT]) -> tuple[int, int, int]:
        rank, failure = item
        kind, when = _order(failure)
        return (3 if rank in silent and failure.exitcode == -9 else kind), when, rank

    return min(failures.items(), key=order)


def lost_a_peer(text: str) -> bool:
    """Whether a rank's last words only say that another one is gone."""
    return any(words in text for words in _LOST)


def _order(failure: Failure) -> tuple[int, int]:
    if failure.exitcode == USER_ERROR:
        return 0, failure.timestamp
    lost = failure.exitcode in _ENDED_BY_OTHERS or lost_a_peer(str(failure.message))
    return (2 if lost else 1), failure.timestamp
