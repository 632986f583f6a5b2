"""Nodes that are made, used and gone again, however their owner ends. Needs root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tools.links.shared import refusal
from zpp_lab.tools.links.namespaces import inside
from zpp_lab.tools.links.network import TBF, Command, Tools
from zpp_lab.tools.links.nodes import EmulatedNodes
from zpp_lab.tools.links.probe import probe
from zpp_lab.train.launch import processes
from zpp_lab.train.launch.processes import EmulationError

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())
JOB = Path(__file__).with_name("job.py")


def gone(pids: list[int], patience: float = 240.0) -> bool:
    deadline = time.monotonic() + patience
    while any(Path(f"/proc/{pid}/ns/net").exists() and running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def running(pid: int) -> bool:
    return bool(processes._started(pid))


def own_mark(owner: str) -> bool:
    return owner == processes.mark()


def test_nodes_reach_each_other_at_the_named_speed_and_nothing_else() -> None:
    with EmulatedNodes(2, Tools.find()) as nodes:
        nodes.limit(0.1)
        before = nodes.sent(0)
        report = probe(nodes, 0.1, seconds=0.4, streams=2)
        assert (
            max(report.gbps_there, report.gbps_back, report.gbps_both) < 0.2
        )  # far from what a free link gives
        assert report.latency_us > 0
        assert nodes.sent(0) - before > 2**18
        with pytest.raises(OSError):  # no way out of the nodes
            inside(nodes.places[0], lambda: socket.create_connection(("192.0.2.1", 9), 0.2))
        nodes.limit(None)
        names = os.listdir("/sys/class/net")
        assert nodes.interface not in names  # the host itself sees nothing of it
        pids = [process.pid for process in nodes.processes]
    assert gone(pids, 0.0)
    assert processes.marked(own_mark) == []


def test_bursts_of_many_streams_lose_nothing_on_a_slow_link() -> None:
    burst, streams = 2**19, 48
    with EmulatedNodes(2, Tools.find()) as nodes:
        nodes.limit(0.5)
        server = inside(nodes.places[1], lambda: socket.create_server((nodes.address(1), 0)))
        address = server.getsockname()[:2]

        def connect() -> socket.socket:
            return socket.create_connection(address, 60)

        for _ in range(streams):
            sender = inside(nodes.places[0], connect)
            taken, _peer = server.accept()
            for work, given in ((sender.sendall, (bytes(burst),)), (_take, (taken, burst))):
                threading.Thread(target=work, args=given, daemon=True).start()
        deadline = time.monotonic() + 240
        while nodes.sent(0) < burst * streams and time.monotonic() < deadline:
            time.sleep(0.05)
        assert nodes.sent(0) >= burst * streams
        said = Tools.find().run(
            Command(0, ("tc", "-s", "qdisc", "show", "dev", str(nodes.interface)), TBF),
            nodes.places[0],
        )
        assert "(dropped 0," in said
        assert nodes.in_order
        assert nodes.resent(0) < streams  # some probes of a stream's end, none for an overtaken one
        server.close()


def _take(stream: socket.socket, size: int) -> None:
    with stream:
        while size > 0 and (taken := stream.recv(2**20)):
            size -= len(taken)


def test_three_nodes_meet_on_a_bridge() -> None:
    with EmulatedNodes(3, Tools.find()) as nodes:
        nodes.limit(0.5)
        server = inside(nodes.places[2], lambda: socket.create_server((nodes.address(2), 0)))
        port = server.getsockname()[1]
        for node in (0, 1):
            target = (nodes.address(2), port)
            inside(nodes.places[node], lambda t=target: socket.create_connection(t, 120)).close()
        server.close()


class Refuses:
    """Tools whose third command fails, as on a kernel without some part."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, command: Command, pid: int) -> str:
        self.calls += 1
        if self.calls == 3:
            raise EmulationError("no such part")
        return ""


def test_a_failure_half_way_leaves_nothing() -> None:
    nodes = EmulatedNodes(4, Refuses())
    with pytest.raises(EmulationError), nodes:
        pass
    assert processes.marked(own_mark) == []


def _heeds_interrupts() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored; that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_owner_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    root = str(JOB.parents[2])
    owner = subprocess.Popen(
        [sys.executable, str(JOB), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        preexec_fn=_heeds_interrupts,
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "pids").exists():
        assert owner.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 4
    assert all(running(pid) for pid in pids)
    owner.send_signal(number)
    owner.wait(240)
    assert gone(pids)


def test_a_later_start_ends_what_a_dead_owner_left() -> None:
    dead = "4194304:1"
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, processes.VARIABLE: dead})
    mine = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, processes.VARIABLE: processes.mark()}
    )
    try:
        while left.poll() is None and left.pid not in processes.marked(lambda owner: owner == dead):
            time.sleep(0.02)  # until exec has given it its environment
        processes.end_orphans()
        assert left.wait(240) == -signal.SIGKILL
        assert mine.poll() is None  # a living owner's stay
    finally:
        for process in (left, mine):
            process.kill()
            process.wait()
