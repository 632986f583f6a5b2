"""Ranks notice when one of them fails, or falls silent."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from zpp_lab import pulse as pulses
from zpp_lab.pulse import Pulse

NEVER = 600.0  # seconds


def heard(how: str) -> list[Any]:
    """What ranks 0 and 2 heard of rank 1, which fails, falls silent, is missed or just leaves.

    Only rank 0, which watches rank 1, loses its patience: the others may be slow machines.
    """
    said: list[Any] = []
    event = threading.Event()

    def note(rank: int, text: str) -> None:
        said.append([rank, text.splitlines()[-1]])
        event.set()

    rank = dist.get_rank()
    pulses.PATIENCE = 5 * pulses.BEAT if rank == 0 else NEVER
    pulse = Pulse(3.0 if rank == 0 and how == "silent" else NEVER, note)
    if rank == 1:
        if how == "fails":
            pulse.fail("Traceback\nKeyError: 'a'")
        elif how in ("silent", "missed"):
            pulse.left.set()  # its thread ends without a word
        else:
            pulse.leave()
    if how == "leaves":
        dist.barrier()  # from here on rank 1 gives no sign of life
        if rank == 0:
            pulse.silence = 0.5
            event.wait(3 * pulses.BEAT)
    elif how == "missed" and rank == 2:
        pulse.lost_a_peer("Connection closed by peer")
    elif rank != 1:
        event.wait(NEVER)
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, said)
    dist.barrier()
    return [every[0], every[2]]


def both(*jobs: str) -> list[Any]:
    return [heard(job) for job in jobs]


def test_the_others_hear_of_it() -> None:
    fails, silent, missed, leaves = run_world(3, both, "fails", "silent", "missed", "leaves")
    assert fails == [[[1, "KeyError: 'a'"]]] * 2
    for rank_0, rank_2 in (silent, missed):
        assert rank_0 == rank_2
        assert [rank for rank, _ in rank_0] == [1]
        assert re.fullmatch(r"no sign of life for \d+ s: killed, .*", rank_0[0][1])
    assert leaves == [[], []]
