"""A gather and a reduction by codec, against the backend's own; bench.py --help has the options.

One unit of bf16 parameters of the given size, encode and decode included. Beside each time
stand two floors: the bytes that one rank must receive at the wire's rate, and the bytes that
its memory must move at the memory's rate. With everything overlapped, the larger one is the
least time possible. The stages (encode, transfer, decode or sum) are timed apart as well, one
after the other without overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Codec, RawCodec, kernels
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.gather import Gather, GatherSpec
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.peer.choose import Choice
from zpp_lab.collectives.reduce import Reduce, ReduceSpec
from zpp_lab.collectives.transport import all_gather
from zpp_lab.config.codec import BITS
from zpp_lab.config.parser import Parser, listed, new_file, number, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.config.wires import Wire
from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.tools.bench.ranks import Timing, join, start

Call = Callable[[], object]
COLUMNS, PARTS = 1024, 4  # a unit of four matrices
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One measurement; `ms` is the slowest rank's median."""

    what: str
    codec: str
    mib: int
    nodes: int
    gpus_per_node: int
    transport: str
    ms: float
    wire_ms: float  # received bytes at the wire's rate
    memory_ms: float  # bytes read and written at the memory's rate
    stages_ms: tuple[float, ...] = ()  # encode, transfer, decode or sum: each on its own


class Bench(Timing):
    """One rank's measurements on one cluster."""

    def __init__(
        self,
        cluster: ClusterConfig,
        device: torch.device,
        args: argparse.Namespace,
        choice: Choice,
    ):
        super().__init__(cluster, device, choice, args.calls, args.warmup)
        self.args, self.choice = args, choice
        self.rows: list[Row] = []

    def size(self, mib: int) -> None:
        """All rows for a unit of `mib` MiB in bf16."""
        world = self.cluster.world
        rows = max(1, mib * MIB // (2 * COLUMNS * PARTS * world)) * world
        whole = [self._random(rows, COLUMNS) for _ in range(PARTS)]
        shards = [w.view(world, -1)[self.transport.rank].clone() for w in whole]
        if self.choice == self.args.transports[0]:
            self._native(mib, whole, shards)
        for name, codec in codecs(self.args.bits):
            numels = [s.numel() for s in shards]
            layout = Layout.build([f"p{i}" for i in range(PARTS)], numels, [codec] * PARTS)
            self._gather(mib, name, layout, shards, whole)
            for hops in self._hops():
                self._reduce(mib, name, layout, whole, hops)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).bfloat16()

    def _hops(self) -> list[tuple[Wire, ...]]:
        one: tuple[Wire, ...] = ("grads_intra",)
        several = self.cluster.nodes > 1 and self.cluster.gpus_per_node > 1
        return [one, ("grads_intra", "grads_inter")] if several else [one]

    def _native(self, mib: int, whole: list[Tensor], shards: list[Tensor]) -> None:
        """The backend's all-gather and reduce-scatter of the same bf16 values, without copies."""
        full, own = torch.cat([w.view(-1) for w in whole]), torch.cat(shards)
        n = full.nbytes
        self._keep("gather", "backend bf16", mib, lambda: all_gather(full, own), n, n)
        if self.device.type == "cuda":
            self._keep(
                "reduce",
                "backend bf16",
                mib,
                lambda: dist.reduce_scatter_tensor(own, full),
                n,
                2 * n,
            )

    def _gather(
        self, mib: int, name: str, layout: Layout, shards: list[Tensor], outs: list[Tensor]
    ) -> None:
        hierarchical = self.cluster.nodes > 1 and self.cluster.gpus_per_node > 1
        spec = GatherSpec("bench", layout, layout, torch.bfloat16, hierarchical=hierarchical)
        gather = Gather(spec, self.transport, Ledger(), Clock(1))

        def call() -> None:
            packet = gather.pack(shards, backward=False)
            gather.send(packet)
            gather.unpack(packet, outs)

        stages: list[Call] = []
        if not hierarchical:
            row = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=self.device)
            out = row.repeat(self.cluster.world, 1)
            kernels.encode(layout, shards, None, row)
            stages = [
                lambda: kernels.encode(layout, shards, None, row),
                lambda: self.transport.gathering(out, "world", "bench", row).send(),
                lambda: kernels.decode(layout, out, outs),
            ]
        payload = self.cluster.world * layout.nbytes
        memory = _nbytes(shards) + layout.nbytes + payload + _nbytes(outs)
        self._keep("gather", name, mib, call, payload, memory, stages)

    def _reduce(
        self, mib: int, name: str, layout: Layout, grads: list[Tensor], hops: tuple[Wire, ...]
    ) -> None:
        spec = ReduceSpec("bench", hops, (layout,) * len(hops))
        reduce = Reduce(spec, self.transport, Ledger(), Clock(1))
        out = torch.empty(layout.numel, dtype=torch.bfloat16, device=self.device)
        names = tuple(s.name for s in layout.segments)
        payload = self.cluster.world * layout.nbytes
        memory = _nbytes(grads) + 2 * payload + out.nbytes
        what = "reduce" if len(hops) == 1 else "reduce in two hops"
        stages = self._reduce_stages(layout, grads, out) if len(hops) == 1 else []
        self._keep(what, name, mib, lambda: reduce.run(names, grads, out), payload, memory, stages)

    def _reduce_stages(self, layout: Layout, grads: list[Tensor], out: Tensor) -> list[Call]:
        rows = torch.empty(self.cluster.world, layout.nbytes, dtype=torch.uint8, device=self.device)
        arrived = torch.empty_like(rows)[:, None]
        kernels.encode(layout, grads, None, rows)
        return [
            lambda: kernels.encode(layout, grads, None, rows),
            lambda: self.transport.exchanging(arrived, "world", "bench").send(),
            lambda: kernels.reduce(layout, arrived, out[None]),
        ]

    def _keep(
        self,
        what: str,
        codec: str,
        mib: int,
        call: Call,
        wire: int,
        memory: int,
        stages: Sequence[Call] = (),
    ) -> None:
        received = wire * (self.cluster.world - 1) / self.cluster.world
        row = Row(
            what,
            codec,
            mib,
            self.cluster.nodes,
            self.cluster.gpus_per_node,
            "backend" if codec == "backend bf16" else self.choice,
            self.milliseconds(call),
            received / self.args.wire_rate / 1e6,
            memory / self.args.memory_rate / 1e6,
            tuple(self.milliseconds(stage) for stage in stages),
        )
        self.rows.append(row)
        if self.transport.rank == 0:
            stages_ms = ", ".join(f"{t:.3f}" for t in row.stages_ms)
            print(
                f"{what:18s} {codec:12s} {mib:4d} MiB {row.nodes}x{row.gpus_per_node} "
                f"{row.transport:7s} {row.ms:8.3f} ms  floors: wire "
                f"{row.wire_ms:.3f}, memory {row.memory_ms:.3f}  stages: {stages_ms}",
                flush=True,
            )


def codecs(bits: list[int]) -> list[tuple[str, Codec]]:
    named: list[tuple[str, Codec]] = [("raw bf16", RawCodec(torch.bfloat16))]
    return named + [(f"{b} bits, 256", BlockCodec(b, 256)) for b in bits]


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def parser() -> argparse.ArgumentParser:
    made = Parser("bench.py", description=__doc__)
    made.add_argument("--ranks", type=whole(1), help="processes (default: one a GPU, or 2)")
    made.add_argument(
        "--nodes", type=listed(whole(1)), default=[1], help="shapes: nodes of the ranks"
    )
    made.add_argument("--transports", type=listed(str, get_args(Choice)), default=["auto"])
    made.add_argument("--mib", type=listed(whole(1)), default=[16, 64, 640], help="bf16 sizes")
    made.add_argument("--bits", type=listed(whole(), BITS), default=[8, 6, 4, 2])
    made.add_argument("--calls", type=whole(1), default=20)
    made.add_argument("--warmup", type=whole(0), default=5)
    made.add_argument(
        "--wire-rate", type=number(above=0), default=316.0, help="GB/s that a rank receives"
    )
    made.add_argument(
        "--memory-rate", type=number(above=0), default=4275.0, help="GB/s, read and write"
    )
    made.add_argument("--cpu", action="store_true", help="on gloo, although there are GPUs")
    made.add_argument("--out", type=new_file, help="a JSON file for the results")
    return made


def main(argv: list[str]) -> int:
    """Start the ranks, unless torchrun has; returns the exit code."""
    args = parser().parse_args(argv)
    gpus = 0 if args.cpu else torch.cuda.device_count()
    if "RANK" not in os.environ:
        ranks = args.ranks or gpus or 2
        for nodes in args.nodes:
            if ranks % nodes:
                raise ValueError(f"--nodes {nodes} does not divide {ranks} ranks: set --ranks")
        start([__file__, *argv], ranks)
        return 0
    _measure(args, gpus > 0)
    return 0


def _measure(args: argparse.Namespace, on_gpu: bool) -> None:
    device = join(on_gpu)
    rows: list[Row] = []
    for nodes in args.nodes:
        world = dist.get_world_size()
        cluster = ClusterConfig(nodes=nodes, gpus_per_node=world // nodes)
        for choice in args.transports:
            bench = Bench(cluster, device, args, choice)
            for mib in args.mib:
                bench.size(mib)
            rows += bench.rows
            torch.cuda.empty_cache()
            if dist.get_rank() == 0 and args.out:  # what is known, should time end here
                _keep(args.out, rows)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _keep(out: Path, rows: list[Row]) -> None:
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    out.parent.mkdir(parents=True, exist_ok=True)
    results = {**facts, "results": [asdict(row) for row in rows]}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
