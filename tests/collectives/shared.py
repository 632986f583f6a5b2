"""Shared memory and streams for the peer transport without a GPU: a thread is a stream.

Every operation is put into the queue of the current stream and done there, after a random
moment, so that an order which the transport only hopes for does not hold here.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.collectives.threads import Post, ThreadTransport
from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.transport import LINKS, HostStreams, Link, members
from zpp_lab.config.schema import ClusterConfig


class Told(HostStreams):
    """Streams that write down what they are asked: on which one, what, and which mark."""

    def __init__(self) -> None:
        self.on, self.log, self.marks = "main", [], 0

    def mark(self, old: Any = None, outside: bool = False) -> Any:
        self.marks += 1
        self.log.append((self.on, "mark", self.marks))
        return self.marks

    def wait(self, mark: Any) -> None:
        self.log.append((self.on, "wait", mark))

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        before, self.on = self.on, name
        yield
        self.on = before

    def here(self) -> Any:
        return self.lane(self.on)


class ThreadStreams:
    """`Streams` of one rank; "main" is current outside lanes. `at_once`: without threads."""

    def __init__(self, seed: int, at_once: bool = False) -> None:
        self.at_once = at_once
        self.queues: dict[str, queue.Queue[Callable[[], None]]] = {}
        self.current, self.random = "main", random.Random(seed)
        self.faults: list[BaseException] = []

    def do(self, work: Callable[[], None]) -> None:
        """Give the current stream some work."""
        if self.at_once:
            return work()
        if self.current not in self.queues:
            self.queues[self.current] = queue.Queue()
            worker = threading.Thread(target=self._work, args=(self.current,), daemon=True)
            worker.start()
        self.queues[self.current].put(work)

    def _work(self, name: str) -> None:
        while True:
            work = self.queues[name].get()
            time.sleep(self.random.choice((0, 0, 0, 0.001)))
            try:
                work()
            except BaseException as error:
                self.faults.append(error)

    def mark(self, old: threading.Event | None = None) -> threading.Event:
        reached = threading.Event()
        self.do(reached.set)
        return reached

    def wait(self, mark: threading.Event) -> None:
        self.do(lambda: None if mark.wait(240) else _fail("a mark was never reached"))

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def finish(self) -> None:
        """The host waits for all streams."""
        for name in list(self.queues):
            with self.lane(name):
                assert self.mark().wait(240), f"stream {name} hangs"
        if self.faults:
            raise self.faults[0]


def _fail(why: str) -> None:
    raise AssertionError(why)


class Board:
    """What the ranks of one link share."""

    def __init__(self, count: int, patience: float) -> None:
        self.patience = patience  # seconds for the others at a meeting
        self.buffers: list[Any] = [None] * count
        self.barriers: dict[int, threading.Barrier] = {}
        self.lock = threading.Lock()
        self.count = count
        self.flags = [-1] * count
        self.raised = threading.Condition()

    def meet(self, own: int, number: int) -> None:
        """As cuda/peer/ship.cu: a rank shows the meeting's number, and waits for the others' to be
        that or a later one. A meeting that comes out of turn takes an earlier one for its own."""
        with self.raised:
            self.flags[own] = number
            self.raised.notify_all()
            there = self.raised.wait_for(lambda: min(self.flags) >= number, self.patience)
        assert there, "the ranks never met"

    def barrier(self, number: int) -> threading.Barrier:
        with self.lock:
            return self.barriers.setdefault(number, threading.Barrier(self.count, timeout=240))


class ThreadMemory:
    """`Shared` of one rank. A barrier is the others' barrier of the same number, or a later one."""

    def __init__(self, streams: ThreadStreams, board: Board, own: int) -> None:
        self.streams, self.board, self.own = streams, board, own
        self.calls = self.allocations = 0

    def allocate(self, nbytes: int) -> Sequence[Tensor]:
        self.streams.finish()
        self.allocations += 1
        before = self.board.buffers[self.own]
        self.board.buffers[self.own] = torch.zeros(nbytes, dtype=torch.uint8)
        self.board.barrier(-2 * self.allocations).wait()
        if before is not None:
            before.fill_(0xEE)  # given up
        found = list(self.board.buffers)
        self.board.barrier(-2 * self.allocations - 1).wait()
        return found

    def express(self) -> None:
        """Thread by thread there are only steps."""

    def barrier(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        self.streams.do(lambda: self.board.meet(self.own, number))

    def pull(self, outs: Sequence[Tensor], sources: Sequence[Tensor], own: int) -> None:
        for out, source in zip(outs, sources, strict=True):
            self.streams.do(lambda out=out, source=source: out.copy_(source))  # type: ignore[misc]


class Boards:
    """All boards of a run, made as they are asked for."""

    def __init__(self, patience: float = 240) -> None:
        self.patience = patience
        self.found: dict[Any, Board] = {}
        self.lock = threading.Lock()

    def board(self, key: Any, count: int) -> Board:
        with self.lock:
            return self.found.setdefault(key, Board(count, self.patience))


class ThreadPeers(PeerTransport):
    """A rank's peer transport over `ThreadMemory`, with its streams."""

    def __init__(
        self, cluster: ClusterConfig, rank: int, post: Post, boards: Boards, at_once: bool
    ) -> None:
        groups = ThreadTransport(cluster, rank, post)
        groups.watched = lambda label, device: contextlib.nullcontext()  # type: ignore[attr-defined]
        self.lanes = ThreadStreams(rank, at_once)
        self.memories: list[ThreadMemory] = []
        self.boards = boards
        maker = {k: lambda k=k: self._memory(k) for k in LINKS}  # type: ignore[misc]
        super().__init__(groups, maker, 0)  # type: ignore[arg-type]

    def _memory(self, link: Link) -> ThreadMemory:
        ranks = members(self.cluster, link, self.rank)
        board = self.boards.board((len(self.memories), *ranks), len(ranks))
        self.memories.append(ThreadMemory(self.lanes, board, ranks.index(self.rank)))
        return self.memories[-1]


def peers(
    boards: Boards, at_once: bool = False
) -> Callable[[ClusterConfig, int, Post], ThreadPeers]:
    return lambda cluster, rank, post: ThreadPeers(cluster, rank, post, boards, at_once)
