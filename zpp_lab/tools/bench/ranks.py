"""A bench of several ranks on this host: how they start, where each works, how calls are timed."""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from zpp_lab.collectives.peer.choose import Choice, connect
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.train.launch.place import die_with_parent

Call = Callable[[], object]
AHEAD = 8_000_000  # clock ticks that a GPU waits while its host queues a call


def start(words: Sequence[str], ranks: int) -> None:
    """Run `python words` as so many ranks; returns when they have ended."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        1,
        1,
        ranks,
        run_id=uuid.uuid4().hex,  # without one torch warns
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    elastic_launch(settings, sys.executable)(*words)


def join(on_gpu: bool) -> torch.device:
    """Join the ranks; returns this one's device."""
    die_with_parent()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return device


def call_seconds(
    call: Call, device: torch.device, ahead: int, before: Call = lambda: None
) -> float:
    """Time one call; a GPU first waits `ahead` clock ticks while `before` is queued."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(ahead)
    before()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


class Timing:
    """Calls that all ranks of a cluster make together, over its transport."""

    def __init__(
        self, cluster: ClusterConfig, device: torch.device, choice: Choice, calls: int, warmup: int
    ) -> None:
        self.cluster, self.device, self.calls, self.warmup = cluster, device, calls, warmup
        self.transport = connect(cluster, Watchdog(120.0), choice, device)
        self.tick = torch.zeros(1, device=device)

    def milliseconds(self, call: Call) -> float:
        """Return median over calls of the slowest rank's time; the cache is flushed between calls.

        On GPUs it is the devices' time: the host is ahead of them, as in training, and they
        start together.
        """
        flush = torch.empty(64 * 2**20, dtype=torch.int32, device=self.device)
        meet = partial(dist.all_reduce, self.tick)  # so that no rank begins before the others
        times = []
        for i in range(self.warmup + self.calls):
            if self.device.type == "cuda":
                flush.zero_()
            dist.barrier()
            seconds = call_seconds(call, self.device, AHEAD, meet)
            if i >= self.warmup:
                times.append(seconds * 1000)
        found = torch.tensor(times, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return statistics.median(found.tolist())
