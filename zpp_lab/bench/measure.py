"""Timing kernels: captured in a CUDA graph, over buffers that rotate through more than the L2.

A graph of calls is replayed, so that the host's part of a launch stays out of the numbers, and
every call of a replay has buffers of its own, so that no call finds its data in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

NODES = 40  # calls in a graph, so that starting it counts for little
CACHE_BYTES = 256 * 2**20  # what one pass over all buffers must exceed: four times an H200's L2
Call = Callable[[], object]


def sets_for(nbytes: int) -> int:
    """How many buffer sets make a pass larger than the cache."""
    return max(2, -(-CACHE_BYTES // max(nbytes, 1)))


def device_seconds(calls: Sequence[Call], repeats: int = 5) -> float:
    """Median seconds of one call, over replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-NODES // len(calls))
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    return _median(graph.replay, repeats) / (len(calls) * rounds)


def eager_device_seconds(calls: Sequence[Call], repeats: int = 5) -> float:
    """The same for work that a graph cannot hold."""
    rounds = -(-NODES // len(calls))
    many = [*calls] * rounds
    return _median(lambda: [call() for call in many], repeats) / len(many)


def call_seconds(
    call: Call, device: torch.device, ahead: int, before: Call = lambda: None
) -> float:
    """One call; on a GPU its own time, which waits `ahead` clock ticks while the host queues
    `before`, not counted, and the call."""
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


def _median(run: Call, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def host_seconds(call: Call, count: int = 300) -> float:
    """Median seconds until a call returns, the device being free."""
    times = []
    for i in range(count):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)
