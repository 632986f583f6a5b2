"""The layout operators in plain torch: the truth for kernels, and the CPU's implementation.

Rows: a payload is uint8 [R, layout.nbytes]. A source or a destination is a whole parameter,
flat; row r of a segment with n elements is elements [r n, (r + 1) n) of it, and what lies past
its end is zero padding. A rank's own shard is the case R = 1.

Segments of a layout that share codec and length are stacked and handled by one call of the
codec: rows do not see each other, so this changes no bit and saves most of the call overhead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp_lab.codecs.base import RawCodec, SegmentNoise
from zpp_lab.codecs.errors import error_sums
from zpp_lab.codecs.layout import Layout, Segment
from zpp_lab.codecs.noise import Noise

Tensors = Sequence[Tensor]


def encode(
    layout: Layout, sources: Tensors, noise: Noise | None, out: Tensor, errors: Tensor | None = None
) -> None:
    """Encode whole parameters (any float dtype, one per segment) into `out`, uint8 [R, nbytes].
    `errors`, fp64 [R, segments, 9], receives each segment's `codecs.errors.error_sums`."""
    assert len(sources) == len(layout.segments)
    for group in layout.groups:
        segments = [layout.segments[i] for i in group]
        rows = [padded_rows(sources[i], out.shape[0], segments[0].numel) for i in group]
        _encode_group(segments, rows, noise, out, rotated=False)
    if errors is not None:
        for i, (segment, source) in enumerate(zip(layout.segments, sources, strict=True)):
            x = padded_rows(source, out.shape[0], segment.numel)
            errors[:, i] = error_sums(segment.codec, x.float(), _slot(out, segment))


def encode_update(
    layout: Layout,
    masters: Tensors,
    kept: Tensors,
    differences: bool,
    noise: Noise | None,
    out: Tensor,
    errors: Tensor | None = None,
) -> None:
    """Run `encode` on `update_inputs`: masters for nodes that hold `kept` of the same elements."""
    encode(layout, update_inputs(layout, masters, kept, differences, len(out)), noise, out, errors)


def update_inputs(
    layout: Layout, masters: Tensors, kept: Tensors, differences: bool, rows: int
) -> list[Tensor]:
    """Return each master x fp32 as it is encoded for nodes that hold m: x rounded to m's dtype;
    with `differences` x - m in fp32, [rows, n], and for raw segments x itself."""
    every = zip(layout.segments, masters, kept, strict=True)
    if not differences:
        return [x.to(m.dtype) for _, x, m in every]
    return [
        x
        if isinstance(s.codec, RawCodec)
        else padded_rows(x, rows, s.numel) - padded_rows(m, rows, s.numel)
        for s, x, m in every
    ]


def decode(
    layout: Layout, payload: Tensor, outs: Tensors, onto: bool = False, ok: Tensor | None = None
) -> None:
    """Decode uint8 [R, nbytes] into whole contiguous parameters, rounded once to their dtype. onto:
    add to the present values in fp32; raw segments replace them. ok: a bool on the device; where it
    is false nothing changes."""
    assert len(outs) == len(layout.segments)
    for group in layout.groups:
        segments = [layout.segments[i] for i in group]
        values = segments[0].codec.decode(_stack(payload, segments), segments[0].numel)
        add = onto and not isinstance(segments[0].codec, RawCodec)
        flat = [outs[i].view(-1) for i in group]
        parts = [part.reshape(-1) for part in values.chunk(len(group))]
        new = [part[: len(out)] for part, out in zip(parts, flat, strict=True)]
        if add:  # torch computes fp32 with bf16 in fp32
            new = [out + x for out, x in zip(flat, new, strict=True)]
        if ok is not None:
            new = [torch.where(ok, x, out) for out, x in zip(flat, new, strict=True)]
        torch._foreach_copy_(flat, new)


def decode_sum(layout: Layout, payload: Tensor, sums: Tensor) -> None:
    """Add payload rows uint8 [K, R, nbytes] to `sums`, fp32 [R, coded_numel], k = 0 first."""
    for group in layout.groups:
        segments = [layout.segments[i] for i in group]
        codec, rotated = segments[0].codec, segments[0].codec.rotation is not None
        for row in payload:
            stacked = _stack(row, segments)[None]
            values = codec.decode_sum(stacked, segments[0].numel, rotated=rotated)
            for segment, part in zip(segments, values.chunk(len(group)), strict=True):
                sums_of(sums, segment).add_(part)


def encode_sums(
    before: Layout, layout: Layout, sums: Tensor, noise: Noise | None, out: Tensor
) -> None:
    """Encode sums of a hop with layout `before`, fp32 [R, before.coded_numel], for the next hop. A
    segment whose two codecs share their rotation stays in the rotated domain."""
    for group in layout.groups:
        segments = [layout.segments[i] for i in group]
        rotation = segments[0].codec.rotation
        for stay in (False, True):
            chosen = [i for i in group if _stays(before.segments[i], rotation) == stay]
            parts = [_leave(before.segments[i], sums, stay) for i in chosen]
            if chosen:
                _encode_group([layout.segments[i] for i in chosen], parts, noise, out, rotated=stay)


def finish_sums(layout: Layout, sums: Tensor) -> Tensor:
    """Rotate sums back: fp32 [R, coded_numel] → [R, numel], segments side by side."""
    if not any(s.codec.rotation for s in layout.segments):
        return sums
    return torch.cat(_finished(layout, sums), dim=1)


def reduce(layout: Layout, payload: Tensor, out: Tensor) -> None:
    """Sum payload rows uint8 [K, R, nbytes] into `out`, [R, numel] fp32 or bf16. 0 + row 0 + row 1
    + ... in fp32, then out of the rotated domain, then one rounding."""
    found = _finished(layout, _summed(layout, payload))
    for segment, values in zip(layout.segments, found, strict=True):
        out[:, segment.offset_numel : segment.offset_numel + segment.numel].copy_(values)


def decode_sum_encode(
    before: Layout, layout: Layout, payload: Tensor, noise: Noise | None, out: Tensor
) -> None:
    """Do the middle of a two-hop reduction: payload rows uint8 [K, R, before.nbytes] of the first
    hop → payload uint8 [R, layout.nbytes] of the second. Equals `decode_sum` onto zeros, then
    `encode_sums`; on kernels the sums never leave the chip."""
    encode_sums(before, layout, _summed(before, payload), noise, out)


def padded_rows(source: Tensor, rows: int, numel: int) -> Tensor:
    """Return a whole parameter as [rows, numel], zeros past its end; a view where possible."""
    flat = source.reshape(-1)
    if flat.numel() != rows * numel:
        flat = torch.nn.functional.pad(flat, (0, rows * numel - flat.numel()))
    return flat.view(rows, numel)


def _summed(layout: Layout, payload: Tensor) -> Tensor:
    """Sum payload rows; those of a part of a layout at their places in the whole one's sums."""
    width = max((s.coded_offset + s.coded_numel for s in layout.segments), default=0)
    sums = torch.zeros(payload.shape[1], width, device=payload.device)
    decode_sum(layout, payload, sums)
    return sums


def _encode_group(
    segments: list[Segment], rows: list[Tensor], noise: Noise | None, out: Tensor, rotated: bool
) -> None:
    """Encode rows [R, n] of segments with one codec into their places in `out`."""
    first, many = segments[0], len(segments) > 1
    ids = [s.parameter for s in segments]
    drawn = SegmentNoise(noise, ids[0], tuple(ids[1:])) if noise is not None else None
    place = _slot(out, first)
    target = place.new_empty(len(rows) * place.shape[0], first.nbytes) if many else place
    first.codec.encode(torch.cat(rows) if many else rows[0], drawn, target, rotated=rotated)
    if many:
        for segment, part in zip(segments, target.chunk(len(segments)), strict=True):
            _slot(out, segment).copy_(part)


def _stack(payload: Tensor, segments: list[Segment]) -> Tensor:
    """Stack the segments' bytes: uint8 [G R, nbytes]."""
    slots = [_slot(payload, s) for s in segments]
    return torch.cat(slots) if len(slots) > 1 else slots[0]


def _slot(payload: Tensor, segment: Segment) -> Tensor:
    return payload[:, segment.offset : segment.offset + segment.nbytes]


def sums_of(sums: Tensor, segment: Segment) -> Tensor:
    """Return a segment's columns of sums fp32 [R, coded_numel], a view."""
    return sums[:, segment.coded_offset : segment.coded_offset + segment.coded_numel]


def _stays(old: Segment, rotation: object) -> bool:
    return rotation is not None and old.codec.rotation == rotation


def _finished(layout: Layout, sums: Tensor) -> list[Tensor]:
    """Return each segment's sums [R, numel], out of the rotated domain."""
    found = [sums_of(sums, s) for s in layout.segments]
    for group in layout.groups:
        first = layout.segments[group[0]]
        if first.codec.rotation is not None:
            left = first.codec.rotation.inverse(torch.cat([found[i] for i in group]), first.numel)
            for i, part in zip(group, left.chunk(len(group)), strict=True):
                found[i] = part
    return found


def _leave(segment: Segment, sums: Tensor, stay: bool) -> Tensor:
    """Return the segment's sums, out of the rotated domain unless they stay."""
    part, rotation = sums_of(sums, segment), segment.codec.rotation
    return part if stay or rotation is None else rotation.inverse(part, segment.numel)
