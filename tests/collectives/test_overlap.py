"""Transfers that travel while the next one is encoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.collectives.shared import Told
from zpp_lab.collectives.transport import Overlap


def does(streams: Told, what: str) -> Callable[[], None]:
    return lambda: streams.log.append((streams.on, what, 0))


def test_one_is_finished_when_the_next_has_left() -> None:
    streams = Told()
    overlap = Overlap(streams, "travels")
    with streams.lane("encodes"):
        for i in range(3):
            does(streams, f"encode {i}")()
            overlap.ship(does(streams, f"send {i}"), does(streams, f"finish {i}"))
    overlap.join()
    overlap.join()
    assert [(on, what, mark) for on, what, mark in streams.log if what != "mark"] == [
        ("encodes", "encode 0", 0),
        ("travels", "wait", 1),
        ("travels", "send 0", 0),
        ("encodes", "encode 1", 0),
        ("travels", "wait", 3),
        ("travels", "send 1", 0),
        ("encodes", "wait", 2),
        ("encodes", "finish 0", 0),
        ("encodes", "encode 2", 0),
        ("travels", "wait", 5),
        ("travels", "send 2", 0),
        ("encodes", "wait", 4),
        ("encodes", "finish 1", 0),
        ("encodes", "wait", 6),
        ("encodes", "finish 2", 0),
        ("main", "wait", 7),
    ]
    marks = [on for on, what, _ in streams.log if what == "mark"]
    assert marks == ["encodes", "travels"] * 3 + ["encodes"]


def test_what_could_not_be_sent_is_never_finished() -> None:
    streams = Told()
    overlap = Overlap(streams, "travels")

    def fails() -> None:
        raise RuntimeError

    overlap.ship(does(streams, "send 0"), does(streams, "finish 0"))
    with pytest.raises(RuntimeError):
        overlap.ship(fails, does(streams, "finish 1"))
    overlap.forget()  # the step has failed
    overlap.join()
    assert not [what for _, what, _ in streams.log if what.startswith("finish")]
