"""Copies of peers' rows, kernels that read them in place, and process groups, for one unit.

Alone: encode to decode (or sum), one after the other. Added: by how much products of bf16 matrices
take longer with the collective among them, in the order of streams that FSDP2 has. A gather is
encoded and sent on a stream beside the products and decoded behind them on theirs, so what a copy
brings meanwhile is hidden and what a kernel pulls is not; a reduction runs beside them as a whole.
The products take about twice as long as the slowest collective alone.

`crossovers` is what `engine.pull=auto` reads: the size from which on the kernel adds less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec
from zpp_lab.collectives.clock import Clock
from zpp_lab.collectives.gather import Gather, GatherSpec, Packet
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.reduce import Reduce, ReduceSpec
from zpp_lab.collectives.transport import Kind, Transport
from zpp_lab.crossover import Crossover
from zpp_lab.layout import Layout

Call = Callable[[], object]
Halves = tuple[Callable[[], Any], Callable[[Any], object]]
COLUMNS, PARTS = 1024, 4  # a unit of four matrices
MIB = 2**20
BLOCK = 256
KINDS: tuple[Kind, ...] = ("gather", "exchange")
COVER = 2.0  # products take so many times the slowest collective


@dataclass(frozen=True)
class Row:
    """One way of one collective. received: bytes that a rank gets of the others'. Milliseconds
    are the slowest rank's median."""

    kind: Kind
    bits: int
    mib: int  # of bf16
    received: int
    way: str
    alone_ms: float
    added_ms: float
    products_ms: float  # alone


class Unit:
    """A unit's bf16 parameters and its layout, for every way of one kind."""

    def __init__(self, cluster_world: int, rank: int, mib: int, bits: int, device: torch.device):
        rows = max(1, mib * MIB // (2 * COLUMNS * PARTS * cluster_world)) * cluster_world
        made = torch.Generator(device).manual_seed(rank)
        size = (rows, COLUMNS)
        self.whole = [torch.randn(size, device=device, generator=made).bfloat16() for _ in "abcd"]
        self.shards = [w.view(cluster_world, -1)[rank].clone() for w in self.whole]
        self.names = tuple(f"p{i}" for i in range(PARTS))
        numels = [s.numel() for s in self.shards]
        self.layout = Layout.build(self.names, numels, [BlockCodec(bits, BLOCK)] * PARTS)
        self.received = (cluster_world - 1) * self.layout.nbytes
        self.out = torch.empty(self.layout.numel, dtype=torch.bfloat16, device=device)

    def halves(self, kind: Kind, transport: Transport) -> Halves:
        """What runs beside the model, and what the model's stream waits to run after it: the
        second takes what the first gave."""
        if kind == "gather":
            spec = GatherSpec("bench", self.layout, self.layout, torch.bfloat16)
            gather = Gather(spec, transport, Ledger(), Clock(1))

            def start() -> Packet:
                packet = gather.pack(self.shards, backward=False)
                gather.send(packet)
                return packet

            return start, lambda packet: gather.unpack(packet, self.whole)
        spec_ = ReduceSpec("bench", ("grads_intra",), (self.layout,))
        reduce = Reduce(spec_, transport, Ledger(), Clock(1))
        return lambda: reduce.run(self.names, self.whole, self.out), lambda _: None


class Beside:
    """One rank's measurements. timed: milliseconds of a call, by all ranks alike. width: of the
    square matrices that are multiplied."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        timed: Callable[[Call], float],
        device: torch.device,
        width: int = 4096,
    ) -> None:
        self.transports, self.timed, self.device = transports, timed, device
        first = next(iter(transports.values()))
        self.world, self.rank = first.cluster.world, first.rank
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.factor = torch.randn(width, width, device=device, dtype=dtype)
        self.product: Tensor = torch.empty_like(self.factor)
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.each = timed(lambda: self._products(8)) / 8

    def rows(self, kind: Kind, mib: int, bits: int) -> list[Row]:
        """All ways of one collective of a unit of `mib` MiB."""
        unit = Unit(self.world, self.rank, mib, bits, self.device)
        halves = {way: unit.halves(kind, t) for way, t in self.transports.items()}
        alone = {way: self.timed(self._alone(*both)) for way, both in halves.items()}
        count = max(4, math.ceil(COVER * max(alone.values()) / max(self.each, 1e-3)))
        products = self.timed(lambda: self._products(count))
        found = []
        for way, both in halves.items():
            added = self.timed(self._beside(count, *both)) - products
            found.append(Row(kind, bits, mib, unit.received, way, alone[way], added, products))
        return found

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.factor, self.factor, out=self.product)

    @staticmethod
    def _alone(start: Callable[[], Any], finish: Callable[[Any], object]) -> Call:
        return lambda: finish(start())

    def _beside(
        self, count: int, start: Callable[[], Any], finish: Callable[[Any], object]
    ) -> Call:
        def call() -> None:
            if self.side is not None:
                self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side) if self.side is not None else nullcontext():
                under_way = start()
            self._products(count)
            if self.side is not None:
                torch.cuda.current_stream().wait_stream(self.side)
            finish(under_way)

        return call


def crossovers(ranks: int, rows: Iterable[Row]) -> Crossover:
    """The size from which on the kernel added less than the copies at every size measured."""
    known = list(rows)
    gather, exchange = (_least([r for r in known if r.kind == kind]) for kind in KINDS)
    return Crossover(ranks, gather, exchange)


def _least(rows: Sequence[Row]) -> float | None:
    added = {(r.received, r.bits, r.way): r.added_ms for r in rows}
    cases = sorted({(r.received, r.bits) for r in rows}, reverse=True)
    least = None
    for received, bits in cases:
        if added[received, bits, "kernel"] >= added[received, bits, "copy"]:
            return least
        least = float(received)
    return least
