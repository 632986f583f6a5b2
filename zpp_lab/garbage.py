"""Python's garbage collector in the step loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """In the body no collection looks at the objects that there were before it.

    A model, its optimizer and torch's own modules are some 10^6 objects. A full collection visits
    all of them, at another moment on each rank, and every rank waits for the slowest.
    """
    settle()
    try:
        yield
    finally:
        gc.unfreeze()


def settle() -> None:
    """The same until the process ends."""
    gc.collect()
    gc.freeze()
