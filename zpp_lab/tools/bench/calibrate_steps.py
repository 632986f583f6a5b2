"""What a step's work takes: a decoder block by its FLOPs, the host's launches, transfers between
ranks by size, and the codecs' kernels.

The host is measured with models so small that nothing else bounds it: of one block and of `layers`,
alone, under FSDP2, and under FSDP2 with recomputed blocks, each until the call returns. What FSDP2
adds to a forward is a gather a unit; to a backward, a gather and a reduction. What a block adds to
the whole step beyond these is `block_rest_s`, what no block accounts for `step_s`. All take turns,
since a machine's pace changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpp_lab.codecs import BlockCodec, Codec, Noise, RawCodec, kernels
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.transport import Link
from zpp_lab.config.data import DataConfig
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import ClusterConfig, Config, RecipeConfig, TrainConfig
from zpp_lab.engines.build import plan_of
from zpp_lab.engines.norm import squares
from zpp_lab.engines.optim.host import zeros
from zpp_lab.models import build_model
from zpp_lab.models.start import materialize
from zpp_lab.tools.bench.ranks import Timing, call_seconds
from zpp_lab.tools.bench.step.engines import PlainFsdp2
from zpp_lab.tools.plan.cost.machine import OPERATORS, Between, Bus, Curve, Host, Inside, Mode
from zpp_lab.tools.plan.cost.machine import Codec as CodecSeconds
from zpp_lab.tools.plan.cost.transfers import codec_key
from zpp_lab.train.footprint import settled

CALLS, WARMUP = 8, 3
PRODUCT, PRODUCTS = 8192, 6  # 6.6 TFLOP: longer than the largest gather on NVLink
BESIDE = 64  # 70 TFLOP: longer than 2 GiB take each way
BLOCK = 256
KINDS = ("gather", "reduce")
ROWS = 4  # of a sum
LEAST = 16  # elements: of a launch that does next to nothing
NOISE = Noise(0x5EED, (0,), (0,))
BF16 = torch.bfloat16
LASTING = 5e-3  # seconds: the host starts what takes longer faster than it runs
HEAT = 3.0  # seconds of load before clocks are those of training


class Links:
    """Transfers alone, all ranks together."""

    def __init__(self, cluster: ClusterConfig, device: torch.device) -> None:
        self.bench = Timing(cluster, device, "auto", CALLS, WARMUP)
        self.cluster, self.device = cluster, device

    def inside(self, transfer_sizes: Sequence[int]) -> Inside:
        """Measure the links inside a node, by bytes that a rank receives from its node."""
        link: Link = "local" if self.cluster.nodes > 1 else "world"
        local = self.cluster.gpus_per_node
        gather, reduce = (self._curve(kind, link, local, transfer_sizes) for kind in KINDS)
        return Inside(gather, reduce, self._share(link, max(transfer_sizes)))

    def _share(self, link: Link, nbytes: int) -> float:
        """How much longer products take during a gather, for each of its seconds."""
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

        alone, both_s, moved = (self.bench.milliseconds(c) for c in (products, both, gather))
        return min(1.0, max(0.0, (both_s - alone) / min(moved, both_s)))

    def between(self, transfer_sizes: Sequence[int], gbps: float) -> Between:
        """Measure the links between nodes, from the smallest transfer and the largest, both by all
        ranks of a node at once. ValueError on one host, and where a link is faster than its
        name."""
        nodes, local = self.cluster.nodes, self.cluster.gpus_per_node
        if nodes == 1:
            raise ValueError(
                f"--link-gbps {gbps:g} needs several hosts: start bench calibrate on them with "
                "torchrun, or set --efficiency and --latency-us"
            )
        sizes = sorted(transfer_sizes)[:: max(1, len(transfer_sizes) - 1)]
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

    def _curve(self, kind: str, link: Link, members: int, transfer_sizes: Sequence[int]) -> Curve:
        points = []
        rows = [max(16, nbytes // (members - 1) // 16 * 16) for nbytes in transfer_sizes]
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
    """Return seconds an element of the inputs, of bf16 values, by operator and codec."""
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


Shape = tuple[int, int, int, int]  # dim, ffn, heads, tokens
SEQUENCE = 2048  # tokens of one sequence, at most
COMPUTE_REPEATS = 5
AHEAD = 60_000_000  # clock ticks that a GPU waits, so that its host is ahead of it

# The small models with which the host is measured
HOST_REPEATS = 15
CLOCK = time.perf_counter  # seconds
TOKENS, VOCABULARY = 16, 256  # no fewer than bytes
NORMED_LAYERS = 8
ALONE, AGAIN, FSDP2 = "alone", "again", "fsdp2"
Case = tuple[str, str, int]  # what runs, its mode, blocks
Times = tuple[float, ...]  # seconds of forward and backward; under FSDP2 of a whole step too


def curve(shapes: Sequence[Shape], mode: str, device: torch.device) -> Curve:
    """Return seconds by the FLOPs of one forward."""
    return rising([(flops(shape), block_seconds(shape, mode, device)) for shape in shapes])


def flops(shape: Shape) -> float:
    """Return the FLOPs of a forward, as `train/speed.py` counts them."""
    dim, ffn, _, tokens = shape
    weights = 4 * dim * dim + 3 * dim * ffn
    return 2.0 * weights * tokens + 2.0 * min(tokens, SEQUENCE) * dim * tokens


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """Return a curve whose seconds never fall: a larger amount that was faster is noise."""
    made: list[tuple[float, float]] = []
    for amount, seconds in sorted(points):
        made.append((amount, max(seconds, made[-1][1] if made else 0.0)))
    return Curve(tuple(made))


def block_seconds(shape: Shape, mode: str, device: torch.device) -> float:
    """Return a third of forward and backward, on the device."""
    block, x = drawn_block(shape, mode, device)
    ran = lasting_seconds(lambda: passed(block, x), device)
    return ran / 3


def passed(block: nn.Module, x: Tensor) -> None:
    block.zero_grad(set_to_none=True)
    x.grad = None  # nothing is added up
    block(x).backward(x)


def drawn_block(shape: Shape, mode: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a block in bf16 and its input [batch, length, dim]."""
    dim, ffn, heads, tokens = shape
    settings = ModelConfig(dim=dim, ffn=ffn, heads=heads, kv_heads=heads, layers=1, vocab_size=16)
    model = drawn(settings, device).bfloat16()
    if mode == "compiled":
        from zpp_lab.engines.compile import compile_units  # loads the compiler

        compile_units(model.units(), False)
    length = min(tokens, SEQUENCE)
    x = torch.randn(tokens // length, length, dim, device=device, dtype=torch.bfloat16)
    return model.layers[0], x.requires_grad_()


@torch.no_grad()
def drawn(settings: ModelConfig, device: torch.device) -> Any:
    """Return the built-in decoder with weights of about the usual size."""
    model = build_model(settings, settings.vocab_size, "meta")
    materialize(model, device)
    for p in model.parameters():
        p.normal_(0, 0.02)
    return model


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return median of one call; on a GPU its own time, the host being ahead."""
    call()
    call()
    return statistics.median(call_seconds(call, device, AHEAD) for _ in range(COMPUTE_REPEATS))


def lasting_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return what a call takes among many in a row, if the device is the bound: its clocks fall
    under a load that lasts. A single one, after a pause, took a sixth less on an H200."""
    once = device_seconds(call, device)
    if device.type != "cuda" or once < LASTING:
        return once
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for end, seconds in zip(ends, (HEAT, HEAT / 2), strict=True):
        for _ in range(calls := max(1, round(seconds / once))):
            call()
        end.record()
    ends[1].synchronize()
    return ends[0].elapsed_time(ends[1]) / 1000 / calls


def copy_rate(nbytes: int, device: torch.device) -> float:
    """Return bytes a second, read and written."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / device_seconds(lambda: target.copy_(source), device)


def bus(nbytes: int, device: torch.device) -> Bus:
    """Every rank calls it, as GPUs of a host share its memory; the slowest rank's figures count.
    Both ways are measured beside matrix products, as a step uses them."""
    cuda = device.type == "cuda"
    dist.barrier()
    began = CLOCK()
    near, far = (zeros((nbytes,), torch.uint8, device, True) for _ in range(2))
    pinning = (CLOCK() - began) / (2 * nbytes / 2**30)
    came, goes = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    factor = torch.randn(PRODUCT if cuda else 1, PRODUCT if cuda else 1, device=device, dtype=BF16)
    out, busy = (torch.cuda.Stream(), torch.cuda.Stream()) if cuda else (None, None)

    def bring() -> None:
        came.copy_(near, non_blocking=True)

    def send() -> None:
        far.copy_(goes, non_blocking=True)

    def both() -> None:
        if out is None or busy is None:
            bring()
            send()
            return
        for stream in (out, busy):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(busy):  # for longer than the copies
            for _ in range(BESIDE):
                torch.mm(factor, factor)
        with torch.cuda.stream(out):
            send()
        bring()
        torch.cuda.current_stream().wait_stream(out)

    dist.barrier()
    found = [device_seconds(call, device) for call in (bring, send, both)]
    slowest = torch.tensor([*found, pinning], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    in_s, out_s, both_s, pin_s = slowest.tolist()
    return Bus(nbytes / in_s, nbytes / out_s, 2 * nbytes / both_s, pin_s)


def host(layers: int, width: int, normed: int, modes: Sequence[Mode], device: torch.device) -> Host:
    """Return every rank calls it; seconds are this rank's. layers: 2 or more."""
    calls = cases(layers, width, modes, device)
    with settled():
        times = in_turns(calls)
        norm = _norm(normed, device)
    return figures(times, layers, modes, norm)


def figures(times: Mapping[Case, Times], layers: int, modes: Sequence[Mode], norm_s: float) -> Host:
    """Work out the host's figures from the seconds of each case with one block and with `layers`.
    Noise may make a part negative; it counts as 0 then, and the parts after it bear the
    difference."""

    def each(what: str, mode: str, part: int) -> float:
        few, many = times[what, mode, 1][part], times[what, mode, layers][part]
        return max(0.0, (many - few) / (layers - 1))

    forward, backward = ({m: each(ALONE, m, part) for m in modes} for part in (0, 1))
    again = {
        m: max(0.0, sum(each(AGAIN, m, part) - each(FSDP2, m, part) for part in (0, 1)))
        for m in modes
    }
    bare, whole = times[ALONE, "eager", layers], times[FSDP2, "eager", layers]
    gather = max(0.0, (whole[0] - bare[0]) / (layers + 1))
    reduce = max(0.0, (whole[1] - bare[1] - layers * gather) / (layers + 1))
    block = forward["eager"] + backward["eager"]
    rest = max(0.0, each(FSDP2, "eager", 2) - block - 2 * gather - reduce)
    step = whole[2] - layers * (block + rest) - (2 * layers + 1) * gather - (layers + 1) * reduce
    return Host(
        block_forward_s=forward,
        block_backward_s=backward,
        gather_s=gather,
        reduce_s=reduce,
        step_s=max(0.0, step),
        norm_s=norm_s,
        block_again_s=again,
        block_rest_s=rest,
    )


def cases(
    layers: int, width: int, modes: Sequence[Mode], device: torch.device
) -> dict[Case, Callable[[], Times]]:
    found: dict[Case, Callable[[], Times]] = {}
    for mode in modes:
        for blocks in (1, layers):
            plain = settings(blocks, width)
            again = replace(plain, checkpoint_activations=True)
            found[ALONE, mode, blocks] = alone(plain, mode, device)
            found[FSDP2, mode, blocks] = sharded(plain, mode, device)
            found[AGAIN, mode, blocks] = sharded(again, mode, device)
    return found


def in_turns(calls: Mapping[Case, Callable[[], Times]]) -> dict[Case, Times]:
    """Return medians of what each call returns; two turns warm up."""
    found: dict[Case, list[Times]] = {case: [] for case in calls}
    for _ in range(HOST_REPEATS + 2):
        for case, call in calls.items():
            found[case].append(call())
    return {
        case: tuple(statistics.median(part) for part in zip(*own[2:], strict=True))
        for case, own in found.items()
    }


def settings(layers: int, width: int) -> ModelConfig:
    return ModelConfig(
        dim=width, ffn=2 * width, heads=2, kv_heads=2, layers=layers, vocab_size=VOCABULARY
    )


def fsdp2_config(model: ModelConfig) -> Config:
    cluster = ClusterConfig(nodes=1, gpus_per_node=dist.get_world_size())
    train = TrainConfig(batch_size=1, param_dtype="bf16", reduce_dtype="bf16")
    return Config(
        model=model,
        data=DataConfig(seq_len=TOKENS),
        recipe=RecipeConfig(name="zero3"),
        cluster=cluster,
        train=train,
    )


def alone(model: ModelConfig, mode: str, device: torch.device) -> Callable[[], Times]:
    made = drawn(model, device).bfloat16()
    if mode == "compiled":
        from zpp_lab.engines.compile import compile_units  # loads the compiler

        compile_units(made.units(), False)
    return lambda: _passes(made, device)


def sharded(model: ModelConfig, mode: str, device: torch.device) -> Callable[[], Times]:
    config = fsdp2_config(model)
    engine = replace(config.engine, compile=mode == "compiled")
    timed = PlainFsdp2(replace(config, engine=engine), device)
    batch = _tokens(torch.device("cpu"))

    def call() -> Times:
        step = _once(lambda: timed.step(0, lambda rank, micro: (batch, batch)), device)
        return *_passes(timed.model, device), step

    return call


def _passes(model: torch.nn.Module, device: torch.device) -> Times:
    tokens, losses = _tokens(device), []

    def forward() -> None:
        losses.append(model(tokens, tokens))

    times = _once(forward, device), _once(lambda: losses.pop().backward(), device)
    model.zero_grad(set_to_none=True)
    return times


def _host_seconds(call: Callable[[], object], device: torch.device) -> float:
    times = [_once(call, device) for _ in range(HOST_REPEATS + 2)]
    return statistics.median(times[2:])


def _once(call: Callable[[], object], device: torch.device) -> float:
    """Until the call returns: the device is free before and is not waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = CLOCK()
    call()
    return CLOCK() - began


def _norm(width: int, device: torch.device) -> float:
    """Of shards as wide as a real model's, so that sums are as deep."""
    plan = plan_of(fsdp2_config(settings(NORMED_LAYERS, width)))
    grads: dict[str, Tensor] = {
        p.name: torch.zeros(p.shard_numel, device=device)
        for u in plan.units
        for p in u.unit.parameters
    }
    return _host_seconds(lambda: squares(grads, plan, device), device)


def _tokens(device: torch.device) -> Tensor:
    return torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
