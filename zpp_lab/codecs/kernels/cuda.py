"""The layout operators on CUDA kernels: the same calls as reference.py, the same bits.

Segments of codecs that the kernels do not know run through their own torch code, those that share
codec and length together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp_lab.codecs.errors import SUMS, TILE
from zpp_lab.codecs.kernels import reference
from zpp_lab.codecs.kernels.reference import Tensors
from zpp_lab.codecs.kernels.table import (
    STORES,
    hop,
    incoming,
    noise_rows,
    outgoing,
    signed,
    update_settings,
)
from zpp_lab.codecs.layout import Layout, Segment
from zpp_lab.codecs.noise import Noise
from zpp_lab.codecs.numerics import fold_sum

NAMES = (
    "encode",
    "decode",
    "decode_sum",
    "reduce",
    "encode_sums",
    "encode_remembering",
    "finish_sums",
    "decode_sum_encode",
    "adamw",
    "square_sums",
    "add_in_order",
)


def register_fakes() -> None:
    """Register shape functions for torch.compile: the operators write into their arguments only."""
    for name in NAMES:
        torch.library.register_fake(f"zpp_lab::{name}", lambda *args, **kwargs: None)


def encode(
    layout: Layout, sources: Tensors, noise: Noise | None, out: Tensor, errors: Tensor | None = None
) -> None:
    table = outgoing(layout)
    if table.kernel:
        own = (
            [sources[i].contiguous() for i in table.kernel]
            if table.others
            else [s if s.is_contiguous() else s.contiguous() for s in sources]
        )
        partials = None
        if errors is not None:  # error sums of each tile, `count` left out
            tiles = out.shape[0] * sum(_tiles(layout.segments[i]) for i in table.kernel)
            partials = torch.empty(tiles, len(SUMS) - 1, dtype=torch.float64, device=out.device)
        noise_args = _noise(noise, layout, out)
        torch.ops.zpp_lab.encode.default(own, table.rows, *noise_args, out, partials)
        if errors is not None and partials is not None:
            _fold_partials(layout, table.kernel, partials, errors)
    if table.others:
        part = layout.part(table.others)
        own = [sources[i] for i in table.others]
        if errors is None or part is layout:
            reference.encode(part, own, noise, out, errors)
        else:
            found = errors.new_empty(len(errors), len(own), errors.shape[-1])
            reference.encode(part, own, noise, out, found)
            errors[:, list(table.others)] = found


def encode_update(
    layout: Layout,
    masters: Tensors,
    kept: Tensors,
    differences: bool,
    noise: Noise | None,
    out: Tensor,
    errors: Tensor | None = None,
) -> None:
    if not kept:
        return
    known = kept[0].dtype in STORES and not outgoing(layout).others
    if errors is not None or not known:
        given = reference.update_inputs(layout, masters, kept, differences, len(out))
        return encode(layout, given, noise, out, errors)
    settings = update_settings(layout, kept[0].dtype, differences)
    if settings is None:
        return encode(layout, masters, noise, out)
    nothing = [out.new_empty(0)] * len(kept)
    encode_remembering(None, layout, masters, noise, out, settings, kept, nothing)


def decode(
    layout: Layout, payload: Tensor, outs: Tensors, onto: bool = False, ok: Tensor | None = None
) -> None:
    table = incoming(layout)
    if table.kernel:
        own = [outs[i] for i in table.kernel] if table.others else list(outs)
        torch.ops.zpp_lab.decode.default(payload, table.rows, own, onto, ok)
    if table.others:
        part = layout.part(table.others)
        reference.decode(part, payload, [outs[i] for i in table.others], onto, ok)


def decode_sum(layout: Layout, payload: Tensor, sums: Tensor) -> None:
    table = incoming(layout)
    if table.kernel:
        torch.ops.zpp_lab.decode_sum.default(payload, table.rows, sums)
    if table.others:
        reference.decode_sum(layout.part(table.others), payload, sums)


def reduce(layout: Layout, payload: Tensor, out: Tensor) -> None:
    table = incoming(layout)
    if table.kernel:
        torch.ops.zpp_lab.reduce.default(payload, table.rows, out)
    if table.others:
        reference.reduce(layout.part(table.others), payload, out)


def encode_sums(
    before: Layout, layout: Layout, sums: Tensor, noise: Noise | None, out: Tensor
) -> None:
    table = hop(before, layout)
    if table.kernel:
        torch.ops.zpp_lab.encode_sums.default(sums, table.rows, *_noise(noise, layout, out), out)
    if table.others:
        old, new = before.part(table.others), layout.part(table.others)
        reference.encode_sums(old, new, sums, noise, out)


def encode_remembering(
    before: Layout | None,
    layout: Layout,
    sources: Tensors,
    noise: Noise | None,
    out: Tensor,
    settings: Tensor,
    kept: Tensors,
    targets: Tensors,
) -> None:
    """Run `memory.encode`, or with the layout of the hop `before` `memory.encode_sums` on one
    tensor of sums, in one kernel. All segments are the kernels' own.

    settings: int64 [segments, 3] on the host, see memory_at in cuda/bindings/fill.h. kept, outs:
    each segment's residual now (empty: zeros) and where the next one goes; where that is empty
    `kept` is subtracted and nothing stored.
    """
    table = outgoing(layout) if before is None else hop(before, layout)
    assert not table.others
    torch.ops.zpp_lab.encode_remembering.default(
        [s.contiguous() for s in sources] if before is None else list(sources),
        before is not None,
        table.rows,
        *_noise(noise, layout, out),
        out,
        settings,
        list(kept),
        list(targets),
    )


def finish_sums(layout: Layout, sums: Tensor) -> Tensor:
    table = incoming(layout)
    if table.others or not any(s.codec.rotation for s in layout.segments):
        return reference.finish_sums(layout, sums)
    out = torch.empty(sums.shape[0], layout.numel, dtype=sums.dtype, device=sums.device)
    torch.ops.zpp_lab.finish_sums.default(sums, table.rows, out)
    return out


def decode_sum_encode(
    before: Layout, layout: Layout, payload: Tensor, noise: Noise | None, out: Tensor
) -> None:
    table = hop(before, layout)
    if table.kernel:
        args = _noise(noise, layout, out)
        torch.ops.zpp_lab.decode_sum_encode.default(payload, table.rows, *args, out)
    if table.others:
        old, new = before.part(table.others), layout.part(table.others)
        reference.decode_sum_encode(old, new, payload, noise, out)


def _tiles(segment: Segment) -> int:
    """Count the tiles of one row, which are those of `error_sums`: filling never adds one."""
    return -(-segment.numel // TILE)


def _fold_partials(layout: Layout, chosen: Sequence[int], partials: Tensor, errors: Tensor) -> None:
    """Fold the sums of tiles into `errors`, fp64 [R, segments, 9], in the order of `error_sums`."""
    done, rows = 0, errors.shape[0]
    for i in chosen:
        segment = layout.segments[i]
        tiles = _tiles(segment)
        part = partials[done : done + rows * tiles].view(rows, tiles, len(SUMS) - 1)
        done += rows * tiles
        errors[:, i, :-1] = fold_sum(part.transpose(1, 2))
        # by a tensor, since CUDA turns division by a Python number into a product
        codes = errors.new_full((), max(segment.coded_numel, 1))
        errors[:, i, -2] = errors[:, i, -2] / codes * segment.numel
        errors[:, i, -1] = segment.numel


def _noise(noise: Noise | None, layout: Layout, out: Tensor) -> tuple[int, Tensor | None]:
    """Return key and rows as the operators take them."""
    if noise is None or not layout.stochastic:
        return 0, None
    if noise.words is not None:
        return 0, noise.words
    return signed(noise.key), noise_rows(noise.ranks, noise.rows, out.device)
