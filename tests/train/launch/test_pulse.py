"""Ranks notice when one of them fails, falls silent, ends, or falls behind."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from zpp_lab.train.launch import heartbeat as pulses
from zpp_lab.train.launch.heartbeat import Hub, Pulse

NEVER = 600.0  # seconds


class Case:
    """What this rank does and hears where rank 1 fails, falls silent, ends or hangs, where ranks
    just leave, or where the thread of rank 0 stands still.

    Where nothing else must tell, only the rank that must lose its patience has little: the others
    may be slow machines.
    """

    def __init__(self, how: str) -> None:
        self.how, self.rank = how, dist.get_rank()
        self.said: list[Any] = []
        self.event, self.still, self.ending = (threading.Event() for _ in range(3))
        self.known = threading.Semaphore(0)
        hurried = (how, self.rank) in (("silent", 0), ("rank 0 is silent", 2))
        self.pulse = Pulse(3.0 if hurried else NEVER, self.note, self.doing)

    def note(self, lost: int | None, text: str) -> None:
        self.said.append([lost, text])
        self.event.set()

    def doing(self) -> tuple[int, str]:
        if self.still.is_set():
            time.sleep(NEVER)
        if self.ending.is_set():
            raise SystemExit
        self.known.release()
        begun = 7 if self.how == "hangs" and self.rank != 1 else 3
        return begun, f"a transfer of rank {self.rank}"

    def act(self) -> None:
        how, rank, pulse = self.how, self.rank, self.pulse
        lost = 0 if how == "rank 0 is silent" else 1
        if rank == lost:
            if how == "fails":
                pulse.fail("Traceback\nKeyError: 'a'")
            elif how in ("silent", "rank 0 is silent", "missed"):
                self.still.set()
            elif how == "ends":
                for _ in range(2):
                    self.known.acquire()  # the first beat has been answered
                self.ending.set()
        if how == "leave":
            if rank != 0:
                pulse.leave()
            dist.barrier()  # from here on these give no sign of life
            if rank == 0:
                pulse.silence = 0.5
                self.event.wait(3.0)
                pulse.leave()
        elif how in ("missed", "hangs", "alike") and rank == 2:
            pulse.missing("Connection closed by peer")
        elif rank == 2 or (rank == 0 and lost == 1):
            self.event.wait(NEVER)

    def heard(self) -> list[Any]:
        """By ranks 0 and 2."""
        every: list[Any] = [None] * 3
        dist.all_gather_object(every, self.said)
        return [every[0], every[2]]


def each(*jobs: str) -> list[Any]:
    """All cases side by side, each with pulses of its own: they mostly wait."""
    pulses.BEAT = 0.25
    cases = [Case(job) for job in jobs]
    acts = [threading.Thread(target=case.act) for case in cases]
    for thread in acts:
        thread.start()
    for thread in acts:
        thread.join()
    return [case.heard() for case in cases]


def test_the_others_hear_of_it() -> None:
    jobs = ("fails", "silent", "missed", "ends", "hangs", "alike", "leave", "rank 0 is silent")
    found = dict(zip(jobs, run_world(3, each, *jobs), strict=True))
    fault = "ended the run: KeyError: 'a'\nTraceback\nKeyError: 'a'"
    assert found["fails"] == [[[1, fault]]] * 2
    for how in ("silent", "missed"):
        rank_0, rank_2 = found[how]
        assert rank_0 == rank_2
        assert [rank for rank, _ in rank_0] == [1]
        assert re.match(r"has sent no heartbeat for \d+ s: it was stopped", rank_0[0][1])
    assert found["ends"] == [[[1, "has ended"]]] * 2
    behind = "hangs: it is alive, but has not started what others wait for, and itself waits"
    for ((rank, text),) in found["hangs"]:
        assert rank == 1
        assert text.startswith(behind)
    nobody = "no rank is silent or behind: Connection closed by peer"
    assert found["alike"] == [[[None, nobody]]] * 2
    assert found["leave"] == [[], []]
    none, ((lost, text),) = found["rank 0 is silent"]
    assert (none, lost) == ([], 0)
    assert text.startswith("has sent no heartbeat for")


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b'{"rank": 7}\n', b'{"rank": 7}\n{"rank": 7}\n']
)
def test_a_stranger_at_the_port_of_rank_0_is_shown_out(line: bytes) -> None:
    hub = Hub(2, NEVER)
    with socket.create_connection(("localhost", hub.port), timeout=30) as stranger:
        stranger.sendall(line)
        for _ in range(2):  # it comes, and speaks
            hub.look(30)
        assert stranger.recv(10) == b""
    assert hub.ended is None


ORDINARY = """
import os, sys, time
import torch.distributed as dist
from zpp_lab.train.launch import heartbeat as pulse
pulse.BEAT = 1e-4
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
pulse.Pulse(600.0, lambda rank, text: None)
time.sleep(0.3)
dist.barrier()
"""


def test_a_rank_that_ends_in_the_ordinary_way_does_not_abort(tmp_path: Path) -> None:
    """As it did while its thread was in a call of torch's store: the interpreter ends such a
    thread, and C++ then the process."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ORDINARY, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
