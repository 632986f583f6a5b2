"""Ends a process whose collective hangs, and says which one: the wire, the unit and the rank.

NCCL's own watchdog knows sequence numbers, not wires. This thread looks at every transfer in
flight; the first that outlives the limit is named on stderr with the stacks of all threads.
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

import torch

EXIT_CODE = 75  # "temporary failure": the same command goes on from the last checkpoint


@dataclass
class _Transfer:
    label: str
    began: float
    event: torch.cuda.Event | None = None
    ended: bool = False

    def finished(self) -> bool:
        return self.ended or (self.event is not None and self.event.query())


class Watchdog:
    """Watches transfers; `seconds` = 0 watches nothing. `act` is called with the message."""

    def __init__(self, seconds: float, act: Callable[[str], None] | None = None) -> None:
        self.seconds, self.act = seconds, act or _end_process
        self.flying: deque[_Transfer] = deque()
        self.stop = threading.Event()
        if seconds > 0:
            threading.Thread(target=self._look, name="collectives", daemon=True).start()

    @contextmanager
    def watch(self, label: str, device: torch.device) -> Iterator[None]:
        """A transfer that the body starts; on a GPU it goes on after the body."""
        if self.seconds <= 0:
            yield
            return
        transfer = _Transfer(label, time.monotonic())
        self.flying.append(transfer)
        try:
            yield
        except BaseException:
            transfer.ended = True
            raise
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            transfer.event = event
        else:
            transfer.ended = True

    def close(self) -> None:
        self.stop.set()

    def _look(self) -> None:
        while not self.stop.wait(min(1.0, self.seconds / 4)):
            while self.flying and self.flying[0].finished():
                self.flying.popleft()
            late = self.late()
            if late is not None:
                self.stop.set()
                self.act(
                    f"{late} has not finished after {self.seconds:g} s: another rank hangs or is "
                    "gone; engine.timeout_seconds is the limit"
                )

    def late(self) -> str | None:
        """The label of the oldest transfer, once it has taken too long."""
        if not self.flying:
            return None
        oldest = self.flying[0]
        return oldest.label if time.monotonic() - oldest.began > self.seconds else None


def _end_process(message: str) -> None:
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CODE)
