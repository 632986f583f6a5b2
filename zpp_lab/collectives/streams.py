"""Streams of the transports' own, on which bytes travel beside encoding and decoding."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What transports ask of a device's queues; a mark is a point of a stream."""

    def mark(self, old: Any = None) -> Any:
        """This point of the current stream. `old`: a mark that nobody will wait for any more;
        waits that were asked for before stay as they are."""
        ...

    def wait(self, mark: Any) -> None:
        """The current stream goes on once `mark` is reached."""
        ...

    def lane(self, name: str) -> AbstractContextManager[Any]:
        """In it the named stream is the current one. It does not wait for others by itself."""
        ...


class CudaStreams:
    """`Streams` of the current CUDA device. Lanes go before other work: they keep links busy."""

    def __init__(self) -> None:
        self.lanes: dict[str, torch.cuda.Stream] = {}

    def mark(self, old: torch.cuda.Event | None = None) -> torch.cuda.Event:
        return torch.cuda.current_stream().record_event(old)

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def lane(self, name: str) -> AbstractContextManager[Any]:
        if name not in self.lanes:
            self.lanes[name] = torch.cuda.Stream(priority=-1)
        return torch.cuda.stream(self.lanes[name])
