"""Ranks notice when one of them fails, or falls silent."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from zpp_lab.pulse import Pulse


def heard(how: str) -> list[Any]:
    """What ranks 0 and 2 heard of rank 1, which fails, falls silent, is missed or just leaves."""
    said: list[Any] = []
    event = threading.Event()

    def note(rank: int, text: str) -> None:
        said.append([rank, text.splitlines()[-1]])
        event.set()

    pulse = Pulse(600.0 if how == "missed" else 3.0, note)
    if dist.get_rank() == 1:
        if how == "fails":
            pulse.fail("Traceback\nKeyError: 'a'")
        elif how in ("silent", "missed"):
            pulse.left.set()  # its thread ends without a word
        else:
            pulse.leave()
    elif how == "missed" and dist.get_rank() == 2:
        pulse.lost_a_peer("Connection closed by peer")
    else:
        event.wait(30.0 if how != "leaves" else 6.0)
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
