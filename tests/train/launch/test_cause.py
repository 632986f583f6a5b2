"""Among ranks that failed together, the one that ended the run is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zpp_lab.train.launch.cause import USER_ERROR, first_cause


@dataclass
class Failed:
    exitcode: int
    message: object = ""
    timestamp: int = 7


CLOSED = Failed(1, {"message": "RuntimeError: [gloo/pair.cc] Connection closed by peer [::1]:5"}, 6)
OURS = Failed(1, {"message": "CollectiveError: rank 0: grads_intra of blocks.3 failed: reset"}, 6)
KILLED, ABORTED, ENDED = Failed(-9), Failed(-6), Failed(-15)
RAISED = Failed(1, {"message": "KeyError: 'a'", "extraInfo": {"py_callstack": "KeyError: 'a'"}})
LOST = "LostRank: rank 0: weights_forward of unit root (world): rank 1 is silent, no sign of life"
SILENT = Failed(1, {"message": LOST, "lost": 1, "why": "is silent, no sign of life for 9 s"}, 6)
GONE = Failed(1, {"message": "LostRank: rank 0: rank 1 is gone", "lost": 1, "why": "is gone"}, 6)
MISTAKE = Failed(USER_ERROR, {"message": "ValueError: no such file"}, 8)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ((CLOSED, KILLED), 1),
        ((OURS, KILLED, CLOSED), 1),
        ((CLOSED, OURS, RAISED), 2),
        ((ABORTED, ENDED, RAISED), 2),
        ((ABORTED, KILLED), 1),
        ((RAISED, MISTAKE), 1),
        ((RAISED, RAISED), 0),
        ((RAISED, Failed(1, "KeyError: 'b'", 6)), 1),
        ((CLOSED,), 0),
        ((SILENT, KILLED), 0),  # by the launcher, as it did not end
        ((GONE, KILLED), 1),
        ((SILENT, ENDED, RAISED), 2),
    ],
)
def test_the_cause_comes_before_what_follows_from_it(
    failures: tuple[Failed, ...], rank: int
) -> None:
    assert first_cause(dict(enumerate(failures))) == (rank, failures[rank])
