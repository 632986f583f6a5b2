"""The same work done by others: torch.compile of the reference, and DeepSpeed's quantizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zpp_lab.bench.measure import device_seconds, eager_device_seconds, sets_for
from zpp_lab.bench.work import BF16, one_segment, work
from zpp_lab.codecs import BlockCodec

NUMEL = 2**27  # 256 MiB of 16-bit values


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
