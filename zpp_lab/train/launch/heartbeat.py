"""Heartbeats between ranks, so that none waits for a dead one.

Every second a thread of each rank (`Pulse`) reports to rank 0 (`Hub`) that it lives, how many
transfers it has begun and which one it waits for. The answer says whether the run is lost, and
through which rank.

Rank 0 judges. A rank is lost that has been silent too long, whose process has ended, or that
reports its own end. Where a transfer has failed or is late although all live, the lost rank is the
one that has begun fewer of them. Without a reply, a rank assumes that rank 0 failed, so ranks that
a link no longer joins end each by themselves. Then every rank says which rank it was and why, and
ends.

Each wait has an end, and a connection without a reply is opened again: after an outage TCP would
wait as long again before it tries. That is why torch's store is not used.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zpp_lab.train.launch.cause import SILENT

BEAT = 1.0  # seconds
PATIENCE = 5 * BEAT  # with a rank that is silent after a transfer has failed or is late
FAILED = "ended the run"  # begins what is state of a rank that failed by itself
LOST = "LostRank"  # an error's name: this rank ends because of another one
_ANSWER = 3  # beats without one: the connection is opened again
_MOST = 2**16  # bytes of a message
_RESET = struct.pack("ii", 1, 0)  # close without pending data that would still try to arrive
Doing = Callable[[], tuple[int, str]]  # transfers begun; the one that is waited for, or ""
End = tuple[int | None, str]  # the rank that ended the run, if it was one, and why


class Lived:
    """Seconds that this process ran: a stop of it, or of its machine, is not silence."""

    def __init__(self) -> None:
        self.seconds, self.last = 0.0, time.monotonic()

    def now(self) -> float:
        """Return the seconds; to be called every few beats at least."""
        clock = time.monotonic()
        self.seconds += min(clock - self.last, 4 * BEAT)
        self.last = clock
        return self.seconds


@dataclass
class _Seen:
    """What rank 0 knows of a rank; times of its `Lived`."""

    heard: float
    begun: int = 0
    at: str = ""
    left: bool = False
    knows: bool = False  # of the run's end
    link: socket.socket | None = None
    gone: float | None = None  # since when nothing joins it any more
    missing: float | None = None  # since when a transfer of its has failed or is late
    reason: str = ""  # what that looked like


@dataclass
class _Link:
    """A connection as it is read."""

    rank: int | None = None
    read: bytearray = field(default_factory=bytearray)


class Hub:
    """Rank 0's part: hears the ranks, and judges how the run ended."""

    def __init__(self, world: int, silence: float) -> None:
        self.silence, self.lived = silence, Lived()
        self.seen = [_Seen(self.lived.now()) for _ in range(world)]
        self.ended: End | None = None
        self.listener = _listener(world)
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def look(self, seconds: float) -> None:
        """Read what comes within `seconds`, answer, and judge."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.listener:
                with contextlib.suppress(OSError):
                    link, _ = self.listener.accept()
                    link.setblocking(False)
                    self.selector.register(link, selectors.EVENT_READ, _Link())
            else:
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        if self.ended is None:
            self.ended = self._judged(self.lived.now())

    def hear(self, rank: int, state: dict[str, Any]) -> None:
        """Take a rank's state."""
        seen, now = self.seen[rank], self.lived.now()
        seen.heard, seen.gone = now, None
        seen.begun, seen.at, seen.left = state["begun"], state["at"], state["left"]
        if state["missing"] and seen.missing is None:
            seen.missing, seen.reason = now, state["missing"]
        if state["failed"] and self.ended is None:
            self.ended = rank, state["failed"]

    def all_know(self) -> bool:
        """Return whether every rank that can be reached knows of the end."""
        now = self.lived.now()
        return all(
            s.knows or s.left or s.gone is not None or now - s.heard > 3 * BEAT
            for s in self.seen[1:]
        )

    def _read(self, link: socket.socket, of: _Link) -> None:
        try:
            came = link.recv(_MOST)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        of.read += came
        if not came or len(of.read) > 2 * _MOST:
            return self._close(link, of)
        while b"\n" in of.read and link.fileno() >= 0:  # a bad line has closed it
            line, _, rest = of.read.partition(b"\n")
            of.read = bytearray(rest)
            self._answer(link, of, bytes(line))

    def _answer(self, link: socket.socket, of: _Link, line: bytes) -> None:
        try:
            state = json.loads(line)
            rank = int(state["rank"])
            seen = self.seen[rank]
            seen.link, of.rank = link, rank
            self.hear(rank, state)
            link.sendall(json.dumps({"ended": self.ended}).encode() + b"\n")
            seen.knows = self.ended is not None
        except (OSError, ValueError, KeyError, TypeError, IndexError):  # it will try again
            self._close(link, of)

    def _close(self, link: socket.socket, of: _Link) -> None:
        self.selector.unregister(link)
        link.close()
        if of.rank is not None and self.seen[of.rank].link is link:
            self.seen[of.rank].link, self.seen[of.rank].gone = None, self.lived.now()

    def _judged(self, now: float) -> End | None:
        there = [(rank, seen) for rank, seen in enumerate(self.seen) if not seen.left]
        missing = [(seen.missing, rank) for rank, seen in there if seen.missing is not None]
        limit = min(self.silence, PATIENCE) if missing else self.silence
        for rank, seen in there:
            if seen.gone is not None and now - seen.gone > (2 * BEAT if missing else PATIENCE):
                return rank, "has ended"
        # with the one over the limit, all that fell silent about when it did
        quiet = [rank for rank, seen in there if rank and now - seen.heard > limit - 2 * BEAT]
        longest = max((now - self.seen[rank].heard for rank in quiet), default=0.0)
        if longest > limit:
            return quiet[0], silent(longest, quiet[1:])
        if not missing or now - min(missing)[0] < PATIENCE + 3 * BEAT:
            return None
        most = max(self.seen[rank].begun for _, rank in missing)
        behind = [rank for rank, seen in there if seen.begun < most]
        if behind:
            at = self.seen[behind[0]].at
            its = f", and itself waits for {at}" if at else ""
            return behind[0], f"hangs: it is alive, but has not started what others wait for{its}"
        return None, f"no rank is silent or behind: {self.seen[min(missing)[1]].reason}"


def silent(seconds: float, more: list[int] | None = None) -> str:
    others = f" (nor have ranks {', '.join(map(str, more))})" if more else ""
    return (
        f"{SILENT} {seconds:.0f} s{others}: it was stopped or killed, or its machine or link failed"
    )


class Pulse:
    """This rank's thread. `act(rank, text)` is called once, in it, when a rank is lost; the first
    line of `text` says why. `doing`: see there."""

    def __init__(
        self, silence: float, act: Callable[[int | None, str], None], doing: Doing = lambda: (0, "")
    ) -> None:
        """Start the thread. Every rank of the default process group builds one together."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.silence, self.act, self.doing = silence, act, doing
        self.left, self.failed, self.reason = False, "", ""
        self.wake, self.known, self.over = (threading.Event() for _ in range(3))
        self.wake.set()
        self.hub = Hub(self.world, silence) if self.rank == 0 else None
        port = [self.hub.port if self.hub else 0]
        dist.broadcast_object_list(port)
        host = os.environ.get("MASTER_ADDR", "localhost")
        self.address = (host, 0) if self.hub else _resolved(host, port[0])
        work = self._judge if self.hub else self._beat
        self.thread = threading.Thread(target=work, name="pulse", daemon=True)
        self.thread.start()

    def fail(self, text: str) -> None:
        """Tell the others that this rank is ending, and why; `act` is not called."""
        self._say(failed=f"{FAILED}: {text.strip().splitlines()[-1]}\n{text}")

    def leave(self) -> None:
        """Report that this rank is done; the others need not watch it any more."""
        self._say(left=True)

    def missing(self, reason: str) -> None:
        """Report a failed or late transfer and wait for `act`, which comes with the `reason` if no
        lost rank is found."""
        self.reason = reason
        self.wake.set()
        self.over.wait(4 * PATIENCE)

    def _say(self, left: bool = False, failed: str = "") -> None:
        self.left, self.failed = left, failed
        self.known.clear()
        self.wake.set()
        self.known.wait(5.0)

    def _state(self) -> dict[str, Any]:
        begun, at = self.doing()
        state = {"rank": self.rank, "begun": begun, "at": at, "missing": self.reason[:1000]}
        return {**state, "left": self.left, "failed": self.failed[: _MOST // 2]}

    def _lost(self, rank: int | None, text: str) -> None:
        if not self.left and not self.failed:
            self.act(rank, text)
        self.known.set()
        self.over.set()

    # ------------------------------------------------------------------ rank 0

    def _judge(self) -> None:
        hub = self.hub
        assert hub is not None
        end = math.inf  # of the time in which the others may ask: answers go with this process
        while not (hub.ended and (hub.all_know() or time.monotonic() > end)) or self.left:
            hub.silence = self.silence
            hub.hear(0, self._state())
            hub.look(BEAT / 2)
            if self.left:
                self.known.set()
            if hub.ended and end == math.inf:
                end = time.monotonic() + PATIENCE
        self._lost(*hub.ended)

    # ------------------------------------------------------------------ the others

    def _beat(self) -> None:
        lived, refused = Lived(), 0
        link: socket.socket | None = None
        answered = lived.now()
        while True:
            self.wake.wait(BEAT)
            self.wake.clear()
            final = self.left or bool(self.failed)
            try:
                link = link or socket.create_connection(self.address, 2 * BEAT)
                ended = _asked(link, self._state(), lived)
                answered, refused = lived.now(), 0
                if ended is not None:
                    return self._lost(*ended)
                if final:
                    return self.known.set()
            except (OSError, ValueError) as error:
                _reset(link)
                link = None
                refused += isinstance(error, ConnectionError)
            quiet = lived.now() - answered
            limit = min(self.silence, PATIENCE) if self.reason else self.silence
            if refused > 2:
                return self._lost(0, "has ended")
            if quiet > limit:
                return self._lost(0, silent(quiet))


def _asked(link: socket.socket, state: dict[str, Any], lived: Lived) -> End | None:
    """Say `state`; what rank 0 says of the run's end. OSError without an answer."""
    link.settimeout(BEAT)
    link.sendall(json.dumps(state).encode() + b"\n")
    came, waited = bytearray(), 0
    while b"\n" not in came:
        lived.now()
        try:
            more = link.recv(_MOST)
        except TimeoutError:
            waited += 1
            if waited == _ANSWER:
                raise
            continue
        if not more:
            raise ConnectionResetError("rank 0 has closed the connection")
        came += more
    ended = json.loads(bytes(came))["ended"]
    return (ended[0], str(ended[1])) if ended else None


def _reset(link: socket.socket | None) -> None:
    if link is not None:
        with contextlib.suppress(OSError):
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        link.close()


def _listener(world: int) -> socket.socket:
    """Open a socket on a free port of all addresses."""
    address, backlog, six = ("", 0), world + 16, socket.AF_INET6
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be turned off
            return socket.create_server(address, family=six, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(address, backlog=backlog)


def _resolved(host: str, port: int) -> tuple[str, int]:
    """Return the host's address, since resolving it again could take long."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # rank 0 may listen without IPv6, and `localhost` has both
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0]), port


def lost_line(own: int, at: str, rank: int | None, text: str) -> str:
    """Return the line that says how rank `own` ended: where it waited, and which rank was lost."""
    which = "" if rank is None else f"rank {rank}, this one, " if rank == own else f"rank {rank} "
    return f"rank {own}: {f'{at}: ' if at else ''}{which}{text.splitlines()[0]}"
