"""Signs of life between ranks that somebody else started, so that none waits for a dead one.

torchrun and srun end a job when a process fails, if they are told to and if they notice. This
does not rely on them: a thread of each rank counts up in a small store of rank 0's, and watches
the next rank. A rank that fails says so there; one that has been silent too long is taken for
dead, and sooner if some rank has lost a peer. Every rank then says which it was and why, and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

FAILED, SUSPECT = "failed", "suspect"
BEAT = 1.0  # seconds
NO_STORE = (RuntimeError, OSError)  # DistNetworkError and its kin: rank 0 does not answer
PATIENCE = 5 * BEAT  # with a rank that is silent after another has lost a peer


class Pulse:
    """This rank's thread. `act(rank, text)` is called once, in it, when some rank is lost."""

    def __init__(self, silence: float, act: Callable[[int, str], None] | None = None) -> None:
        """Every rank of the default process group must build one, at the same time."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.silence, self.act = silence, act or end_process
        self.store = self._store()
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.thread.start()

    def _store(self) -> dist.TCPStore:
        host, wait = os.environ.get("MASTER_ADDR", "localhost"), timedelta(seconds=60)
        port = [0]
        if self.rank == 0:
            store = dist.TCPStore(host, 0, None, True, timeout=wait, wait_for_workers=False)
            port[0] = store.port
        dist.broadcast_object_list(port)
        if self.rank != 0:
            store = dist.TCPStore(host, port[0], None, False, timeout=wait, wait_for_workers=False)
        return store

    def fail(self, text: str) -> None:
        """Tell the others that this rank is ending, and why."""
        self.left.set()
        self.thread.join(5.0)
        with contextlib.suppress(*NO_STORE):  # then rank 0 is gone, and the others see it
            if not self.store.check([FAILED]):
                self.store.set(FAILED, f"{self.rank}\n{text}")
        if self.rank == 0:
            time.sleep(3 * BEAT)  # the store goes with this process: let the others read it

    def lost_a_peer(self, text: str) -> None:
        """Tell the others that some rank is gone, and wait for `act`; fail if nobody is silent."""
        with contextlib.suppress(*NO_STORE):  # this rank's own thread says so
            self.store.set(SUSPECT, str(self.rank))
        self.thread.join(2 * PATIENCE)
        self.fail(text)

    def leave(self) -> None:
        """This rank is done; the others need not watch it any more."""
        self.store.set(f"left/{self.rank}", "")  # first: no moment in which it is only silent
        self.left.set()
        self.thread.join(5.0)

    def _beat(self) -> None:
        watched, seen, changed = (self.rank + 1) % self.world, -1, time.monotonic()
        while not self.left.wait(BEAT):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                lost = self._failed()
                count = self.store.add(f"beat/{watched}", 0)
                if count != seen or self.store.check([f"left/{watched}"]):
                    seen, changed = count, time.monotonic()
                elif (silent := time.monotonic() - changed) > self._limit():
                    text = f"no sign of life for {silent:.0f} s: killed, or its machine is gone"
                    self.store.set(FAILED, f"{watched}\n{text}")
                    lost = watched, text
            except NO_STORE:
                lost = 0, "it no longer answers: killed, or its machine is gone"
            if lost is not None and not self.left.is_set():
                self.act(*lost)
                return

    def _limit(self) -> float:
        return min(self.silence, PATIENCE) if self.store.check([SUSPECT]) else self.silence

    def _failed(self) -> tuple[int, str] | None:
        if not self.store.check([FAILED]):
            return None
        rank, _, text = self.store.get(FAILED).decode().partition("\n")
        return int(rank), text


def end_process(rank: int, text: str) -> None:
    """Say which rank was lost, and end this one."""
    own = os.environ.get("RANK", "0")
    print(f"rank {own}: rank {rank} ended the run: {text}", file=sys.stderr, flush=True)
    os._exit(1)
