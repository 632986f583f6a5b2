"""Notices a collective that hangs, and says which one: the wire and the unit.

NCCL's own watchdog knows sequence numbers, not wires. This thread looks at every transfer in
flight; the first that outlives the limit is named, and ends the process. Where ranks watch each
other (`train/launch/heartbeat.py`), they ask here what this one waits for, and hear of a transfer
that is late.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakSet

import torch

_ALL: WeakSet[Watchdog] = WeakSet()
_MEETINGS: list[str] = []  # what the main thread is in


class CollectiveError(RuntimeError):
    """A transfer failed or took too long; names its wire and unit."""


class GraphTransfers:
    """The transfers of a CUDA graph, each of which leaves the replay's number in pinned memory, so
    that one that does not end can be named. Marks have a stream of their own, for which the
    graph's end alone waits.

    One serves all graphs under a watchdog. Its memory must not be freed while a capture is under
    way, on any thread: torch then marks the streams that used it, and would capture the mark.
    """

    MOST = 2**14

    def __init__(self, device: torch.device) -> None:
        self.labels: list[object] = []
        self.number = torch.zeros(1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(self.MOST, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.replays = 0
        self.lane = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """In a capture, before any transfer."""
        self.labels = []
        self.number.add_(1)
        if self.lane is not None:
            self.lane.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        """In the capture, behind all transfers."""
        if self.lane is not None:
            torch.cuda.current_stream().wait_stream(self.lane)

    def mark(self, label: object) -> None:
        """In the capture, behind a transfer."""
        place = len(self.labels)
        if place < self.MOST:
            self.labels.append(label)
            if self.lane is not None:
                self.lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.lane):  # None: on the CPU
                self.seen[place : place + 1].copy_(self.number, non_blocking=True)

    def start(self, labels: list[object]) -> Replay:
        """A replay of the graph with these transfers is about to begin; the one before may not
        have ended. Its name is the first transfer that has not."""
        self.replays += 1
        return Replay(self.seen, labels, self.replays)


@dataclass(frozen=True)
class Replay:
    """One replay of a graph: which numbers its transfers leave in `seen`."""

    seen: torch.Tensor
    labels: list[object]
    number: int

    def __str__(self) -> str:
        done = self.seen[: len(self.labels)].tolist()
        waits = (str(x) for x, n in zip(self.labels, done, strict=True) if n < self.number)
        return next(waits, "the step's kernels")


class Watch:
    """A transfer that the body starts; on a GPU it goes on after the body. An error names it.

    As a class, since a generator's context manager costs several microseconds.
    """

    __slots__ = ("began", "by", "device", "ended", "event", "label", "own", "rank")

    def __init__(self, by: Watchdog, label: object, device: torch.device, rank: int) -> None:
        self.by, self.label, self.device, self.rank = by, label, device, rank
        self.began, self.ended = 0.0, False
        self.event: torch.cuda.Event | None = None
        self.own: torch.cuda.Event | None = None

    def __enter__(self) -> Watch:
        self.by.begun += 1
        if self.by.seconds > 0 and self.by.capturing is None:
            self.began = time.monotonic()
            self.by.flying.append(self)
        return self

    def own_event(self) -> int:
        """For a body that records the transfer's end by itself: a raw event, 0 for none."""
        by = self.by
        if by.seconds <= 0 or self.device.type != "cuda" or by.capturing is not None:
            return 0
        self.own = self.by.event()
        return int(self.own.cuda_event)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if isinstance(error, (RuntimeError, ValueError)):
            self.ended = True
            self.by.failed = f"{self.label} failed"
            raise CollectiveError(f"rank {self.rank}: {self.label} failed: {error}") from error
        if self.by.capturing is not None:
            self.by.capturing.mark(self.label)
            self.ended = True
            return
        if kind is not None or self.by.seconds <= 0 or self.device.type != "cuda":
            self.ended = True
            return
        if self.own is None:
            self.own = self.by.event()
            self.own.record()
        self.event = self.own

    def finished(self) -> bool:
        try:
            return self.ended or (self.event is not None and self.event.query())
        except RuntimeError:  # the device has failed, and finishes nothing any more
            return False


class Watchdog:
    """Watches transfers; `seconds` = 0 watches nothing. `act` is called with the message."""

    def __init__(self, seconds: float, act: Callable[[str], None] | None = None) -> None:
        self.seconds, self.act = seconds, act or (lambda message: on_late(message))
        self.replayed: GraphTransfers | None = None  # of all CUDA graphs
        self.capturing: GraphTransfers | None = None  # the same during a capture
        self.begun, self.failed = 0, ""  # transfers so far; what befell the first that failed
        self.flying: deque[Watch] = deque()
        self.spare: deque[torch.cuda.Event] = deque()  # of transfers that have finished
        self.moved = 0.0  # when the last of them was seen to have
        self.stop = threading.Event()
        _ALL.add(self)
        if seconds > 0:
            threading.Thread(target=self._look, name="collectives", daemon=True).start()

    def watch(self, label: object, device: torch.device, rank: int = 0) -> Watch:
        return Watch(self, label, device, rank)

    def graphs(self, device: torch.device) -> GraphTransfers:
        """The transfers of CUDA graphs on the device."""
        self.replayed = self.replayed or GraphTransfers(device)
        return self.replayed

    def event(self) -> torch.cuda.Event:
        """One that nothing waits for."""
        if self.spare:
            return self.spare.pop()
        event = torch.cuda.Event()
        event.record()  # it does not exist before
        return event

    def close(self) -> None:
        self.stop.set()
        _ALL.discard(self)

    def _look(self) -> None:
        while not self.stop.wait(min(1.0, self.seconds / 4)):
            late = self.late()
            if late is not None:
                self.stop.set()
                self.failed = f"{late} has not finished after {self.seconds:g} s"
                self.act(
                    f"{self.failed}: another rank hangs or has ended; the limit is "
                    "engine.timeout_seconds"
                )

    def late(self) -> str | None:
        """The label of the oldest transfer, once it has taken too long. It may have been started
        behind others: its time counts from when the one before it was seen to have finished."""
        while self.flying and self.flying[0].finished():
            event = self.flying.popleft().event
            if event is not None:
                self.spare.append(event)
            self.moved = time.monotonic()
        if not self.flying:
            return None
        oldest = self.flying[0]
        passed = time.monotonic() - max(oldest.began, self.moved)
        return str(oldest.label) if passed > self.seconds else None


@contextmanager
def meeting(label: str) -> Iterator[None]:
    """In the body ranks meet in ways that nobody times: their backend's limit holds."""
    _MEETINGS.append(label)
    yield
    _MEETINGS.pop()  # an error leaves it, as what ended the run


def under_way() -> tuple[int, str]:
    """How many transfers this process has begun, and what it waits for: the one that failed or
    is late, or the oldest that has not finished, or a meeting; "" for none."""
    every = list(_ALL)
    begun = sum(watchdog.begun for watchdog in every)
    failed = [watchdog.failed for watchdog in every if watchdog.failed]
    waiting = [w for watchdog in every for w in list(watchdog.flying) if not w.finished()]
    oldest = min(waiting, key=lambda w: w.began, default=None)
    return begun, next(iter([*failed, *([str(oldest.label)] if oldest else []), *_MEETINGS]), "")


def when_late(act: Callable[[str], None]) -> None:
    """What a late transfer leads to from now on in this process, in place of its end."""
    global on_late
    on_late = act


def _end_process(message: str) -> None:
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


on_late: Callable[[str], None] = _end_process
