"""Transfers between ranks by size, and the codecs' kernels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Codec, Noise, RawCodec, kernels
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.transport import Link
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.bench.calibrate_steps import device_seconds, rising
from zpp_lab.tools.bench.collectives import Bench
from zpp_lab.tools.plan.cost.machine import OPERATORS, Between, Curve, Inside
from zpp_lab.tools.plan.cost.machine import Codec as CodecSeconds
from zpp_lab.tools.plan.cost.transfers import codec_key

CALLS, WARMUP = 8, 3
PRODUCT, PRODUCTS = 8192, 6  # 6.6 TFLOP: longer than the largest gather on NVLink
BLOCK = 256
KINDS = ("gather", "reduce")
ROWS = 4  # of a sum
LEAST = 16  # elements: of a launch that does next to nothing
NOISE = Noise(0x5EED, (0,), (0,))
BF16 = torch.bfloat16


class Links:
    """Transfers alone, as `zpp-lab bench collectives` times them."""

    def __init__(self, cluster: ClusterConfig, device: torch.device) -> None:
        args = argparse.Namespace(calls=CALLS, warmup=WARMUP)
        self.bench = Bench(cluster, device, args, "auto")
        self.cluster, self.device = cluster, device

    def inside(self, shipments: Sequence[int]) -> Inside:
        """By bytes that a rank receives from the others of its node."""
        link: Link = "local" if self.cluster.nodes > 1 else "world"
        local = self.cluster.gpus_per_node
        gather, reduce = (self._curve(kind, link, local, shipments) for kind in KINDS)
        return Inside(gather, reduce, self._share(link, max(shipments)))

    def _share(self, link: Link, nbytes: int) -> float:
        """How much longer products take beside a gather, for each of its seconds."""
        if self.device.type != "cuda":
            return 0.0  # they take turns on the cores
        members = self.cluster.gpus_per_node
        gather = self._call("gather", link, members, nbytes // (members - 1) // 16 * 16)
        factor = torch.randn(PRODUCT, PRODUCT, device=self.device, dtype=BF16)
        side = torch.cuda.Stream()

        def products() -> None:
            for _ in range(PRODUCTS):
                torch.mm(factor, factor)

        def both() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                gather()
            products()
            torch.cuda.current_stream().wait_stream(side)

        alone, beside, moved = (self.bench.milliseconds(c) for c in (products, both, gather))
        return min(1.0, max(0.0, (beside - alone) / min(moved, beside)))

    def between(self, shipments: Sequence[int], gbps: float) -> Between:
        """From the smallest shipment and the largest, both by all ranks of a node at once.
        ValueError on one host, and where a link is faster than its name."""
        nodes, local = self.cluster.nodes, self.cluster.gpus_per_node
        if nodes == 1:
            raise ValueError(
                f"--link-gbps {gbps:g} needs several hosts: start bench calibrate on them with "
                "torchrun, or say --efficiency and --latency-us"
            )
        sizes = sorted(shipments)[:: max(1, len(shipments) - 1)]
        small, large = self._curve("gather", "across", nodes, sizes).points[-2:]
        rate = (large[0] - small[0]) * local * 8e-9 / max(large[1] - small[1], 1e-9)
        efficiency = rate / gbps
        if efficiency > 1:
            raise ValueError(
                f"links between nodes carried {rate:.1f} Gbit/s, more than --link-gbps {gbps:g}: "
                "give a node's nominal speed, all its interfaces together"
            )
        latency = max(0.0, small[1] - small[0] * local * 8e-9 / rate) / (nodes - 1)
        return Between(latency, efficiency)

    def _curve(self, kind: str, link: Link, members: int, shipments: Sequence[int]) -> Curve:
        points = []
        rows = [max(16, nbytes // (members - 1) // 16 * 16) for nbytes in shipments]
        self.bench.transport.reserve("gather", link, max(rows))
        self.bench.transport.reserve("exchange", link, members * max(rows))
        for row in rows:
            seconds = self.bench.milliseconds(self._call(kind, link, members, row)) / 1000
            points.append((float(row * (members - 1)), seconds))
        found = rising(points).points
        return Curve(((0.0, found[0][1]), *found))

    def _call(self, kind: str, link: Link, members: int, row: int) -> Callable[[], object]:
        transport = self.bench.transport
        if kind == "gather":
            own = torch.zeros(1, row, dtype=torch.uint8, device=self.device)
            out = own.repeat(members, 1)
            return lambda: transport.gathering(out, link, "calibrate", own).send()
        arrived = torch.zeros(members, 1, row, dtype=torch.uint8, device=self.device)
        return lambda: transport.exchanging(arrived, link, "calibrate").send()


def codecs(bits: Sequence[int], numel: int, device: torch.device) -> CodecSeconds:
    """Seconds an element of the inputs, of bf16 values, by operator and codec."""
    seconds: dict[str, dict[str, float]] = {op: {} for op in OPERATORS}
    for codec in _every(bits):
        for op in OPERATORS:
            key = codec_key(codec, op)[0]
            if key not in seconds[op]:
                seconds[op][key] = _each(op, codec, numel, device)
    least = _call("encode", BlockCodec(bits[0], BLOCK), LEAST, device)
    return CodecSeconds(device_seconds(least, device), seconds)


def _every(bits: Sequence[int]) -> Iterator[Codec]:
    yield RawCodec(BF16)
    for b in bits:
        yield BlockCodec(b, BLOCK)
        yield BlockCodec(b, BLOCK, rounding="stochastic")
        yield BlockCodec(b, BLOCK, hadamard=64)
        yield BlockCodec(b, BLOCK, rounding="stochastic", hadamard=64)


def _each(op: str, codec: Codec, numel: int, device: torch.device) -> float:
    rows = 1 if op in ("encode", "decode") else ROWS
    numel //= rows
    return device_seconds(_call(op, codec, numel, device), device) / (rows * numel)


def _call(op: str, codec: Codec, numel: int, device: torch.device) -> Callable[[], object]:
    layout = Layout.build(["weight"], [numel], [codec])
    values = torch.randn(numel, device=device).to(BF16)
    row = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=device)
    kernels.encode(layout, [values], NOISE, row)
    if op == "encode":
        return lambda: kernels.encode(layout, [values], NOISE, row)
    if op == "decode":
        return lambda: kernels.decode(layout, row, [values])
    many: Tensor = row.repeat(ROWS, 1)[:, None]
    if op == "reduce":
        return lambda: kernels.reduce(layout, many, values[None])
    return lambda: kernels.decode_sum_encode(layout, layout, many, NOISE, row)
