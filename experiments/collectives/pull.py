"""How fast does a GPU pull from its peers' symmetric memory? Three ways, by size.

torchrun --standalone --nproc-per-node 4 experiments/collectives/pull.py --out results

engine    one copy after another on one stream (copy engines)
engines   a stream for each peer
kernel    one kernel for all copies
barrier   the barrier among the ranks alone
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.collectives.symmetric import SymmetricMemory
from zpp_lab.machine import machine_facts, versions
from zpp_lab.place import die_with_parent

MIB = 2**20
SIZES = (1 / 16, 1 / 4, 1, 4, 16, 64, 160)  # MiB from each peer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    die_with_parent()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = SymmetricMemory(dist.group.WORLD, device)
    most = int(max(SIZES) * MIB)
    buffers = memory.allocate(most * world)
    buffers[rank].fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    local = torch.zeros(world, most, dtype=torch.uint8, device=device)
    streams = [torch.cuda.Stream() for _ in range(world)]
    order = [(rank + i) % world for i in range(1, world)]
    rows = [("barrier", 0.0, timed(memory.barrier), 0.0)]
    for mib in SIZES:
        n = int(mib * MIB)
        into, sources = [local[p, :n] for p in order], [buffers[p][:n] for p in order]
        words = [[t.view(torch.int64) for t in ts] for ts in (into, sources)]

        def engine(into: list[Tensor] = into, sources: list[Tensor] = sources) -> None:
            for a, b in zip(into, sources, strict=True):
                a.copy_(b, non_blocking=True)

        def engines(into: list[Tensor] = into, sources: list[Tensor] = sources) -> None:
            current = torch.cuda.current_stream()
            for a, b, stream in zip(into, sources, streams, strict=False):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    a.copy_(b, non_blocking=True)
                current.wait_stream(stream)

        def kernel(words: list[list[Tensor]] = words) -> None:
            torch._foreach_copy_(*words)

        for name, call in (("engine", engine), ("engines", engines), ("kernel", kernel)):
            local.zero_()
            seconds = timed(call)
            good = all(bool((a == p + 1).all()) for a, p in zip(into, order, strict=True))
            assert good, f"{name}: wrong bytes at {mib} MiB"
            rows.append((name, mib, seconds, n * len(order) / seconds / 1e9))
    if rank == 0:
        for name, mib, seconds, rate in rows:
            print(f"{name:8s} {mib:8.3f} MiB a peer {seconds * 1e6:9.1f} us {rate:7.1f} GB/s")
        args.out.mkdir(parents=True, exist_ok=True)
        facts = {"machine": machine_facts(), "versions": versions()}
        (args.out / "pull.json").write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def timed(call: Callable[[], object]) -> float:
    """Median seconds over calls of the slowest rank's time, everything queued beforehand."""
    times = []
    for i in range(14):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda._sleep(400_000)  # so that the host is ahead of the device
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i > 3:
            times.append(begin.elapsed_time(end) / 1000)
    found = torch.tensor(times, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


if __name__ == "__main__":
    main()
