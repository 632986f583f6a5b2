"""What lives before a step loop is left alone in it, and only in it."""

from __future__ import annotations

import gc
import weakref

from zpp_lab.train.footprint import settled


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_what_there_was_is_not_visited_and_what_comes_is() -> None:
    before = Ring()
    old = weakref.ref(before)
    with settled():
        del before
        new = weakref.ref(Ring())
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_objects_that_the_interpreter_froze_do_not_keep_what_there_was() -> None:
    """Python 3.12 freezes objects by itself; each engine before would leave its weights behind."""
    gc.freeze()
    before = Ring()
    old = weakref.ref(before)
    with settled():
        del before
    gc.collect()
    assert old() is None
