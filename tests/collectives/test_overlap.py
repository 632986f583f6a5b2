"""Transfers that travel while the next one is encoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from zpp_lab.collectives.transport import HostStreams, Overlap


class Told(HostStreams):
    """Streams that write down what is asked of each."""

    def __init__(self) -> None:
        self.on, self.log, self.marks = "encodes", [], 0

    def mark(self, old: Any = None, outside: bool = False) -> Any:
        self.marks += 1
        return self.marks

    def wait(self, mark: Any) -> None:
        self.log.append(f"{self.on} waits for {mark}")

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        before, self.on = self.on, name
        yield
        self.on = before

    def here(self) -> Any:
        return self.lane(self.on)

    def does(self, what: str) -> None:
        self.log.append(f"{self.on} {what}")


def test_one_is_finished_when_the_next_has_left() -> None:
    streams = Told()
    overlap = Overlap(streams, "travels")
    for i in range(3):
        streams.does(f"encode {i}")
        overlap.ship(partial(streams.does, f"send {i}"), partial(streams.does, f"finish {i}"))
    streams.on = "computes"
    overlap.join()
    overlap.join()
    # marks 1, 3, 5 are behind encodings, 2, 4, 6 behind transfers
    assert streams.log == [
        "encodes encode 0",
        "travels waits for 1",
        "travels send 0",
        "encodes encode 1",
        "travels waits for 3",
        "travels send 1",
        "encodes waits for 2",
        "encodes finish 0",
        "encodes encode 2",
        "travels waits for 5",
        "travels send 2",
        "encodes waits for 4",
        "encodes finish 1",
        "encodes waits for 6",
        "encodes finish 2",
        "computes waits for 7",
    ]


def test_what_could_not_be_sent_is_never_finished() -> None:
    streams = Told()
    overlap = Overlap(streams, "travels")

    def fails() -> None:
        raise RuntimeError

    overlap.ship(partial(streams.does, "send 0"), partial(streams.does, "finish 0"))
    with pytest.raises(RuntimeError):
        overlap.ship(fails, partial(streams.does, "finish 1"))
    overlap.forget()  # the step has failed
    overlap.join()
    assert "finish" not in " ".join(streams.log)
