"""Python's garbage collector in the step loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """In the body no collection looks at the objects that there were before it.

    torch's own modules alone are some 300,000 objects. A full collection visits all of them (0.1 s
    on a Xeon), at another moment on each rank, and every rank waits for the slowest. What somebody
    froze before stays so.
    """
    frozen = gc.get_freeze_count()
    settle()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def settle() -> None:
    """The same until the process ends."""
    gc.collect()
    gc.freeze()
