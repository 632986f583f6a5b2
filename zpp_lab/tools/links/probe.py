"""What a link between two nodes really gives: bandwidth and latency over plain TCP sockets.

Several streams at once, as NCCL opens them, each way alone and both ways at the same time. On
three nodes or more the flows go round: each node sends to the next.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zpp_lab.tools.links.namespaces import inside
from zpp_lab.tools.links.nodes import EmulatedNodes

LEAST_CHUNK, CHUNK = 2**14, 2**20  # bytes a call: many a second, but not so many that they bound
CHUNK_SECONDS = 0.005
WARM_UP = 0.3  # seconds: TCP grows its window, and the bucket gives away what it had saved
TOLERANCE = 0.05


@dataclass(frozen=True)
class LinkReport:
    """gbps_*: gigabits of payload per second; `both`: the slowest flow when every node sends."""

    named_gbps: float | None  # None: unlimited
    gbps_there: float  # node 0 to node 1 alone
    gbps_back: float
    gbps_both: float
    latency_us: float  # half of the median round trip of one byte, on an idle link
    streams: int

    @property
    def warning(self) -> str | None:
        """Words when a direction is not within 5 % of the named speed."""
        if self.named_gbps is None:
            return None
        found = {"there": self.gbps_there, "back": self.gbps_back, "both ways": self.gbps_both}
        off = {k: v for k, v in found.items() if abs(v / self.named_gbps - 1) > TOLERANCE}
        if not off:
            return None
        text = ", ".join(f"{name} {value:.3g}" for name, value in off.items())
        return (
            f"a link named {self.named_gbps:g} Gb/s carried {text} Gb/s, more than "
            f"{TOLERANCE:.0%} off: figures at this speed are for what it carried"
        )


def probe(
    nodes: EmulatedNodes, named: float | None, seconds: float = 0.7, streams: int = 8
) -> LinkReport:
    """Measure the links as they are now; `seconds` for each of three measurements."""
    ring = [(node, (node + 1) % nodes.nodes) for node in range(nodes.nodes)]
    chunk = _chunk(named, streams)

    def slowest(*pairs: tuple[int, int]) -> float:
        return min(_rates(nodes, pairs, seconds, streams, chunk))

    return LinkReport(
        named, slowest((0, 1)), slowest((1, 0)), slowest(*ring), _latency(nodes), streams
    )


def _chunk(named: float | None, streams: int) -> int:
    """Bytes that one receiving call waits for."""
    if named is None:
        return CHUNK
    return min(CHUNK, max(LEAST_CHUNK, int(named * 1e9 / 8 / streams * CHUNK_SECONDS)))


def _connect(nodes: EmulatedNodes, source: int, target: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from one node to another."""
    places, address = nodes.places, nodes.address(target)
    server = inside(places[target], lambda: socket.create_server((address, 0)))
    with server:
        port = server.getsockname()[1]
        sender = inside(places[source], lambda: socket.create_connection((address, port), 10))
        receiver, _ = server.accept()
    for end in (sender, receiver):
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sender, receiver


class _Flow:
    """One stream: a thread that sends and one that counts what arrives."""

    def __init__(self, ends: tuple[socket.socket, socket.socket], chunk: int) -> None:
        self.sender, self.receiver = ends
        self.chunk, self.arrived = chunk, 0
        self.threads = [threading.Thread(target=work) for work in (self._send, self._receive)]
        for thread in self.threads:
            thread.start()

    def _send(self) -> None:
        data = memoryview(bytes(CHUNK))
        try:
            while True:
                self.sender.send(data)
        except OSError:  # closed: the measurement is over
            pass

    def _receive(self) -> None:
        buffer = bytearray(self.chunk)
        try:
            while count := self.receiver.recv_into(buffer, 0, socket.MSG_WAITALL):
                self.arrived += count
        except OSError:
            pass

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self.sender.close()
        self.receiver.close()


def _rates(
    nodes: EmulatedNodes, pairs: Sequence[tuple[int, int]], seconds: float, streams: int, chunk: int
) -> list[float]:
    """Gigabits per second of each pair, all at the same time."""
    flows = [[_Flow(_connect(nodes, *pair), chunk) for _ in range(streams)] for pair in pairs]
    time.sleep(WARM_UP)
    began, before = time.perf_counter(), [sum(f.arrived for f in pair) for pair in flows]
    time.sleep(seconds)
    after, passed = [sum(f.arrived for f in pair) for pair in flows], time.perf_counter() - began
    for pair in flows:
        for flow in pair:
            flow.close()
    return [(b - a) * 8e-9 / passed for a, b in zip(before, after, strict=True)]


def _latency(nodes: EmulatedNodes, rounds: int = 200) -> float:
    """Microseconds one way."""
    one, other = _connect(nodes, 0, 1)

    def answer() -> None:
        while byte := other.recv(1):
            other.send(byte)

    thread = threading.Thread(target=answer)
    thread.start()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        one.send(b"x")
        one.recv(1)
        times.append(time.perf_counter() - began)
    one.close()
    thread.join()
    other.close()
    return statistics.median(times) * 1e6 / 2
