"""How kernels are timed, and the work that the kernel benchmark times.

The work is operators on one or many segments, and the same done by others: torch.compile of the
reference, and DeepSpeed's quantizer.

Calls are captured in a CUDA graph and replayed, so that the host's part of a launch stays out of
the numbers. Every call of a replay has buffers of its own, more than the L2 holds in all, so that
no call finds its data in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Noise, RawCodec, kernels
from zpp_lab.codecs.errors import SUMS
from zpp_lab.codecs.kernels import memory
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.codecs.layout import Layout

NODES = 40  # calls in a graph, so that starting it counts for little
CACHE_BYTES = 256 * 2**20  # what one pass over all buffers must exceed: four times an H200's L2
Call = Callable[[], object]
SUMMED = 4  # K, payload rows of a reduction
BF16 = torch.bfloat16
NOISE = Noise(0x5EED, (1,), (0,))
OPS = ("encode", "decode", "reduce", "decode_sum", "decode_sum_encode")
NUMEL = 2**27  # of a comparison with others: 256 MiB of 16-bit values


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


@dataclass(frozen=True)
class Work:
    """`prepare` makes one buffer set and returns the call on it; `nbytes` must move in a call."""

    nbytes: int
    prepare: Callable[[], Callable[[], object]]


def payload_of(layout: Layout, rows: int = 1) -> Tensor:
    """uint8 [rows, nbytes] of encoded normal values."""
    out = torch.empty(rows, layout.nbytes, dtype=torch.uint8, device="cuda")
    for row in out:
        values = [torch.randn(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        kernels.encode(layout, values, NOISE, row[None])
    return out


def work(op: str, layout: Layout) -> Work:
    """One operator on bf16 values of a layout, R = 1; sums have K = 4 rows."""
    n, row = layout.numel, layout.nbytes
    moved = {
        "encode": 2 * n + row,
        "encode with errors": 2 * n + row,
        "decode": row + 2 * n,
        "reduce": SUMMED * row + 2 * n,
        "decode_sum": SUMMED * row + 8 * n,
        "decode_sum_encode": SUMMED * row + row,
    }
    return Work(moved[op], lambda: _prepare(op, layout))


def _prepare(op: str, layout: Layout) -> Callable[[], object]:
    out = torch.empty(1, layout.nbytes, dtype=torch.uint8, device="cuda")
    if op == "encode":
        values = [torch.randn(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        return lambda: kernels.encode(layout, values, NOISE, out)
    if op == "encode with errors":
        values = [torch.randn(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        shape = (1, len(layout.segments), len(SUMS))
        errors = torch.empty(shape, dtype=torch.float64, device="cuda")
        return lambda: kernels.encode(layout, values, NOISE, out, errors)
    if op == "decode":
        one = payload_of(layout)
        outs = [torch.empty(s.numel, device="cuda", dtype=BF16) for s in layout.segments]
        return lambda: kernels.decode(layout, one, outs)
    rows = payload_of(layout, SUMMED)[:, None]
    if op == "reduce":
        plain = torch.empty(1, layout.numel, device="cuda", dtype=BF16)
        return lambda: kernels.reduce(layout, rows, plain)
    if op == "decode_sum":
        sums = torch.zeros(1, layout.coded_numel, device="cuda")
        return lambda: kernels.decode_sum(layout, rows, sums)
    return lambda: kernels.decode_sum_encode(layout, layout, rows, NOISE, out)


@dataclass(frozen=True)
class InPlace:
    """`memory.Remembered` of one segment, each row written over by the next."""

    settings: dict[str, Memory]
    row: Tensor

    def stored(self, name: str) -> Tensor:
        return self.row

    def room(self, name: str, device: torch.device) -> Tensor:
        return self.row

    def save(self, name: str, row: Tensor) -> None:
        pass


def remembering(layout: Layout, kept: Memory) -> Work:
    """`encode` with a residual memory of the one segment, which is read and written too."""
    (segment,) = layout.segments

    def prepare() -> Callable[[], object]:
        values = [torch.randn(segment.numel, device="cuda", dtype=BF16)]
        row = kept.pack(torch.randn(1, segment.numel, device="cuda"))
        out = torch.empty(1, layout.nbytes, dtype=torch.uint8, device="cuda")
        rows = InPlace({segment.name: kept}, row)
        return lambda: memory.encode_in_one_pass(None, layout, values, NOISE, out, rows)

    return Work(2 * layout.numel + layout.nbytes + 2 * kept.nbytes(layout.numel), prepare)


def copy_work(nbytes: int) -> Work:
    """A device copy that moves `nbytes` in all, half read and half written."""

    def prepare() -> Callable[[], object]:
        source = torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Work(nbytes, prepare)


def fill_work(nbytes: int) -> Work:
    """Writes alone: what a mix with many writes can reach at most."""

    def prepare() -> Callable[[], object]:
        target = torch.empty(nbytes // 4, dtype=torch.float32, device="cuda")
        return lambda: target.fill_(1.0)

    return Work(nbytes, prepare)


def one_segment(codec: BlockCodec, numel: int) -> Layout:
    return Layout.build(["weight"], [numel], [codec])


def decoder_block(codec: BlockCodec, shards: int) -> Layout:
    """A rank's shard of a 13B decoder block: 10 segments, its norms sent as they are."""
    dim, ffn = 5120, 13824
    numels = [dim * dim] * 4 + [dim * ffn] * 3 + [dim] * 3
    codecs = [codec] * 7 + [RawCodec(BF16)] * 3
    names = [f"segment{i}" for i in range(10)]
    return Layout.build(names, [n // shards for n in numels], codecs)


def measure_peers() -> list[dict[str, Any]]:
    return [*compiled_reference(), *deepspeed_quantizer()]


def own_seconds(op: str, codec: BlockCodec) -> float:
    task = work(op, one_segment(codec, NUMEL))
    return device_seconds([task.prepare() for _ in range(sets_for(task.nbytes))])


def compiled_reference() -> list[dict[str, Any]]:
    """torch.compile of the plain-torch encode, 4 and 6 bits, block 64, against the kernel."""
    rows = []
    for bits in (4, 6):
        codec = BlockCodec(bits, 64)
        x = [torch.randn(1, NUMEL, device="cuda", dtype=BF16) for _ in range(2)]
        out = torch.empty(1, codec.nbytes(NUMEL), dtype=torch.uint8, device="cuda")

        @torch.compile(dynamic=False)
        def encode(x: Tensor, out: Tensor, codec: BlockCodec = codec) -> None:
            codec.encode(x, None, out)

        calls = [lambda x=x, out=out: encode(x, out) for x in x]
        peer = eager_device_seconds(calls, 3)
        rows.append(_row("torch.compile", "encode", codec, own_seconds("encode", codec), peer))
    return rows


def deepspeed_quantizer() -> list[dict[str, Any]]:
    """DeepSpeed's own kernels on fp16, groups of 2048, 4 and 8 bits; [] where not installed."""
    try:
        from deepspeed.ops.op_builder import QuantizerBuilder

        peer = QuantizerBuilder().load()
    except Exception as error:  # its builder raises what its machine check finds
        print(f"DeepSpeed's quantizer is not here: {type(error).__name__}: {error}")
        return []
    rows, groups = [], NUMEL // 2048
    for bits in (4, 8):
        codec = BlockCodec(bits, 2048)
        x = [torch.randn(groups, 2048, device="cuda", dtype=torch.float16) for _ in range(2)]
        coded = [peer.quantize(t, groups, bits, peer.Symmetric) for t in x]
        encode = [lambda t=t, b=bits: peer.quantize(t, groups, b, peer.Symmetric) for t in x]
        decode = [
            lambda c=c, b=bits: peer.dequantize(c[0], c[1], groups, b, peer.Symmetric)
            for c in coded
        ]
        for op, calls in (("encode", encode), ("decode", decode)):
            seconds = eager_device_seconds(calls)
            rows.append(_row("deepspeed", op, codec, own_seconds(op, codec), seconds))
    return rows


def _row(peer: str, op: str, codec: BlockCodec, own: float, other: float) -> dict[str, Any]:
    print(f"{op} {codec.bits} bit: {peer} {other * 1e6:.0f} us, kernel {own * 1e6:.0f} us, "
          f"{other / own:.2f} times as fast")  # fmt: skip
    return {
        "peer": peer,
        "op": op,
        "bits": codec.bits,
        "block": codec.block_size,
        "own_us": own * 1e6,
        "peer_us": other * 1e6,
        "times": other / own,
    }
