"""Python's garbage collector in the step loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_loops = 0  # bodies under way, and what settled for good


@contextmanager
def settled() -> Iterator[None]:
    """In the body no collection looks at the objects that there were before it.

    torch's own modules alone are some 300,000 objects. A full collection visits all of them (0.1 s
    on a Xeon), at another moment on each rank, and every rank waits for the slowest. After the
    outermost body everything is collected as before, also what somebody else froze: from Python
    3.12 on the interpreter freezes objects of its own, so `gc.get_freeze_count` tells nothing.
    """
    global _loops
    settle()
    try:
        yield
    finally:
        _loops -= 1
        if not _loops:
            gc.unfreeze()


def settle() -> None:
    """The same until the process ends."""
    global _loops
    gc.collect()
    gc.freeze()
    _loops += 1
