"""What a gather and a reduction cost a model: by process groups, by copies from peers' memory, and
by kernels that read it in place.

torchrun --standalone --nproc-per-node 2 experiments/collectives/beside.py --out results

Alone and added to products of matrices, as zpp_lab/bench/pulls.py says; then kernels on fewer and
more multiprocessors. Without GPUs: process groups alone, a try of the script's way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zpp_lab.bench.collectives import Bench
from zpp_lab.bench.pulls import KINDS, Beside, Row, crossovers
from zpp_lab.bench.ranks import join
from zpp_lab.collectives.choose import connect
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config import ClusterConfig
from zpp_lab.machine import commit, machine_facts, versions

SWEPT = (16, 32, 64, 0)  # multiprocessors; 0 is all
SWEPT_MIB, SWEPT_BITS = 256, (8, 4)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--mib", default="1,4,16,64,256,640", help="of bf16")
    made.add_argument("--bits", default="8,6,4,2")
    made.add_argument("--calls", type=int, default=8)
    made.add_argument("--warmup", type=int, default=2)
    made.add_argument("--width", type=int, default=4096, help="of the matrices")
    made.add_argument("--seconds", type=float, default=95.0, help="then no more is begun")
    return made


class Session:
    """One rank's part. What is measured is written down at once, should time end."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.began = args, device, time.monotonic()
        self.cluster = ClusterConfig(nodes=1, gpus_per_node=dist.get_world_size())
        self.bench = Bench(self.cluster, device, args, "groups")
        self.rows: list[Row] = []
        self.swept: list[dict[str, Any]] = []

    def connect(self, *pull: Any) -> Transport:
        choice = "peer" if pull else "groups"
        return connect(self.cluster, Watchdog(60.0), choice, self.device, *pull)  # type: ignore[arg-type]

    def beside(self, ways: dict[str, Transport]) -> Beside:
        return Beside(ways, self.bench.milliseconds, self.device, self.args.width)

    def in_time(self) -> bool:
        """Rank 0's clock counts."""
        left = [time.monotonic() - self.began < self.args.seconds]
        dist.broadcast_object_list(left, 0)
        return left[0]

    def compare(self, sizes: Sequence[int], bits: Sequence[int]) -> None:
        ways = {"groups": self.connect()}
        if self.device.type == "cuda":
            ways |= {way: self.connect(way) for way in ("copy", "kernel")}
        beside = self.beside(ways)
        for kind, mib, b in self._every(sizes, bits):
            found = beside.rows(kind, mib, b)
            self.rows += found
            self._tell(f"{kind:8s} {b} bits {mib:4d} MiB", found)

    def sweep(self) -> None:
        ways = {str(n): self.connect("kernel", n) for n in SWEPT}
        beside = self.beside(ways)
        for kind, mib, b in self._every([SWEPT_MIB], SWEPT_BITS):
            found = beside.rows(kind, mib, b)
            self.swept += [asdict(row) for row in found]
            self._tell(f"{kind:8s} {b} bits {mib:4d} MiB on multiprocessors (0: all)", found)

    def _every(self, sizes: Sequence[int], bits: Sequence[int]) -> Iterator[tuple[Any, int, int]]:
        for mib in sizes:
            for b in bits:
                for kind in KINDS:
                    if not self.in_time():
                        return
                    yield kind, mib, b

    def _tell(self, what: str, found: list[Row]) -> None:
        if dist.get_rank():
            return
        ways = "  ".join(f"{r.way}: {r.alone_ms:.3f} alone, {r.added_ms:+.3f}" for r in found)
        print(f"{what}  {ways}", flush=True)
        self.keep()

    def keep(self) -> None:
        facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
        both = self.device.type == "cuda"
        found = asdict(crossovers(self.cluster.world, self.rows)) if both else None
        self.args.out.mkdir(parents=True, exist_ok=True)
        results = {
            **facts,
            "gpu": torch.cuda.get_device_name() if both else None,
            "seconds": time.monotonic() - self.began,
            "pull": found,
            "results": [asdict(row) for row in self.rows],
            "multiprocessors": self.swept,
        }
        (self.args.out / "beside.json").write_text(json.dumps(results, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Milliseconds alone / added, in Markdown: a line a case, a column a way."""
    ways = list(dict.fromkeys(row.way for row in rows))
    lines = ["| | MiB of bf16 | bits | received MB | " + " | ".join(ways) + " |"]
    lines.append("|---" * (4 + len(ways)) + "|")
    cases = dict.fromkeys((r.kind, r.bits, r.mib, r.received) for r in rows)
    for kind, bits, mib, received in sorted(cases):
        own = {r.way: r for r in rows if (r.kind, r.bits, r.mib) == (kind, bits, mib)}
        cells = [f"{own[w].alone_ms:.3f} / {own[w].added_ms:+.3f}" for w in ways]
        head = [kind, str(mib), str(bits), f"{received / 1e6:.1f}"]
        lines.append("| " + " | ".join(head + cells) + " |")
    return "\n".join(lines)


def main() -> None:
    args = parser().parse_args()
    device = join(torch.cuda.is_available())
    session = Session(args, device)
    sizes, bits = ([int(word) for word in text.split(",")] for text in (args.mib, args.bits))
    session.compare(sizes, bits)
    if device.type == "cuda":
        session.sweep()
    if dist.get_rank() == 0:
        session.keep()
        print(table(session.rows), flush=True)
        print(f"{args.out / 'beside.json'}: {time.monotonic() - session.began:.0f} s", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
