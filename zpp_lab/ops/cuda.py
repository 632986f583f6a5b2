"""The layout operators on CUDA kernels: the same calls as reference.py, the same bits.

Segments of codecs that the kernels do not know run through their own torch code, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp_lab.codecs import Noise
from zpp_lab.layout import Layout
from zpp_lab.ops import reference
from zpp_lab.ops.table import hop, incoming, noise_rows, outgoing, signed

NAMES = (
    "encode",
    "decode",
    "decode_sum",
    "reduce",
    "encode_sums",
    "finish_sums",
    "decode_sum_encode",
)


def register_fakes() -> None:
    """Shape functions for torch.compile: the operators write into their arguments only."""
    for name in NAMES:
        torch.library.register_fake(f"zpp_lab::{name}", lambda *args, **kwargs: None)


def encode(layout: Layout, sources: Sequence[Tensor], noise: Noise | None, out: Tensor) -> None:
    table = outgoing(layout)
    if table.kernel:
        own = (
            [sources[i].contiguous() for i in table.kernel]
            if table.others
            else [s if s.is_contiguous() else s.contiguous() for s in sources]
        )
        torch.ops.zpp_lab.encode(own, table.rows, *_noise(noise, layout, out), out)
    for i in table.others:
        reference.encode(_one(layout, i), [sources[i]], noise, out)


def decode(layout: Layout, payload: Tensor, outs: Sequence[Tensor]) -> None:
    table = incoming(layout)
    if table.kernel:
        own = [outs[i] for i in table.kernel] if table.others else list(outs)
        torch.ops.zpp_lab.decode(payload, table.rows, own)
    for i in table.others:
        reference.decode(_one(layout, i), payload, [outs[i]])


def decode_sum(layout: Layout, payload: Tensor, sums: Tensor) -> None:
    table = incoming(layout)
    if table.kernel:
        torch.ops.zpp_lab.decode_sum(payload, table.rows, sums)
    for i in table.others:
        reference.decode_sum(_one(layout, i), payload, sums)


def reduce(layout: Layout, payload: Tensor, out: Tensor) -> None:
    table = incoming(layout)
    if table.kernel:
        torch.ops.zpp_lab.reduce(payload, table.rows, out)
    for i in table.others:
        reference.reduce(_one(layout, i), payload, out)


def encode_sums(
    before: Layout, layout: Layout, sums: Tensor, noise: Noise | None, out: Tensor
) -> None:
    table = hop(before, layout)
    if table.kernel:
        torch.ops.zpp_lab.encode_sums(sums, table.rows, *_noise(noise, layout, out), out)
    for i in table.others:
        reference.encode_sums(_one(before, i), _one(layout, i), sums, noise, out)


def finish_sums(layout: Layout, sums: Tensor) -> Tensor:
    table = incoming(layout)
    if table.others or not any(s.codec.rotation for s in layout.segments):
        return reference.finish_sums(layout, sums)
    out = torch.empty(sums.shape[0], layout.numel, dtype=sums.dtype, device=sums.device)
    torch.ops.zpp_lab.finish_sums(sums, table.rows, out)
    return out


def decode_sum_encode(
    before: Layout, layout: Layout, payload: Tensor, noise: Noise | None, out: Tensor
) -> None:
    table = hop(before, layout)
    if table.kernel:
        args = _noise(noise, layout, out)
        torch.ops.zpp_lab.decode_sum_encode(payload, table.rows, *args, out)
    for i in table.others:
        reference.decode_sum_encode(_one(before, i), _one(layout, i), payload, noise, out)


def _one(layout: Layout, i: int) -> Layout:
    """The segment alone, at the same place in payloads and sums."""
    return Layout((layout.segments[i],))


def _noise(
    noise: Noise | None, layout: Layout, out: Tensor
) -> tuple[int, Tensor | None, Tensor | None]:
    """Key, key on the device, and rows, as the operators take them."""
    if noise is None or not layout.stochastic:
        return 0, None, None
    return signed(noise.key), getattr(noise, "words", None), noise_rows(noise, out.device)
