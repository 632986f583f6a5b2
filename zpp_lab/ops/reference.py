"""The layout operators in plain torch: the truth for kernels, and the CPU's implementation.

Rows: a payload is uint8 [R, layout.nbytes]. A source or a destination is a whole parameter,
flat; row r of a segment with n elements is elements [r n, (r + 1) n) of it, and what lies past
its end is zero padding. A rank's own shard is the case R = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp_lab.codecs import Noise, SegmentNoise
from zpp_lab.layout import Layout, Segment


def encode(
    layout: Layout, sources: Sequence[Tensor], noise: Noise | None, out: Tensor
) -> None:
    """Whole parameters (any float dtype, one per segment) → payload `out` uint8 [R, nbytes]."""
    for segment, source in zip(layout.segments, sources, strict=True):
        rows = padded_rows(source, out.shape[0], segment.numel)
        segment.codec.encode(rows, _noise(noise, segment), _slot(out, segment))


def decode(layout: Layout, payload: Tensor, outs: Sequence[Tensor]) -> None:
    """Payload uint8 [R, nbytes] → whole parameters, rounded once from fp32 to their dtype."""
    for segment, out in zip(layout.segments, outs, strict=True):
        values = segment.codec.decode(_slot(payload, segment), segment.numel)
        out.view(-1).copy_(values.reshape(-1)[: out.numel()])


def decode_sum(layout: Layout, payload: Tensor, sums: Tensor) -> None:
    """Adds payload rows uint8 [K, R, nbytes] to `sums` fp32 [R, coded_numel], k = 0 first."""
    for segment in layout.segments:
        part = sums[:, segment.coded_offset : segment.coded_offset + segment.coded_numel]
        for row in payload:
            part += segment.codec.decode_sum(
                _slot(row, segment)[None], segment.numel, rotated=segment.codec.rotation is not None
            )


def encode_sums(
    before: Layout, layout: Layout, sums: Tensor, noise: Noise | None, out: Tensor
) -> None:
    """Sums of a hop with layout `before`, fp32 [R, before.coded_numel] → payload of the next hop.

    A segment whose two codecs share their rotation stays in the rotated domain.
    """
    for old, new in zip(before.segments, layout.segments, strict=True):
        part = sums[:, old.coded_offset : old.coded_offset + old.coded_numel]
        stay = old.codec.rotation is not None and old.codec.rotation == new.codec.rotation
        if old.codec.rotation is not None and not stay:
            part = old.codec.rotation.inverse(part, old.numel)
        new.codec.encode(part, _noise(noise, new), _slot(out, new), rotated=stay)


def finish_sums(layout: Layout, sums: Tensor) -> Tensor:
    """fp32 [R, coded_numel] → [R, numel]: out of the rotated domain, segments side by side."""
    if layout.coded_numel == layout.numel and not any(s.codec.rotation for s in layout.segments):
        return sums
    parts = []
    for segment in layout.segments:
        part = sums[:, segment.coded_offset : segment.coded_offset + segment.coded_numel]
        rotation = segment.codec.rotation
        parts.append(rotation.inverse(part, segment.numel) if rotation else part)
    return torch.cat(parts, dim=1)


def padded_rows(source: Tensor, rows: int, numel: int) -> Tensor:
    """A whole parameter as [rows, numel], zeros past its end; a view where nothing is missing."""
    flat = source.reshape(-1)
    if flat.numel() != rows * numel:
        flat = torch.nn.functional.pad(flat, (0, rows * numel - flat.numel()))
    return flat.view(rows, numel)


def _slot(payload: Tensor, segment: Segment) -> Tensor:
    return payload[:, segment.offset : segment.offset + segment.nbytes]


def _noise(noise: Noise | None, segment: Segment) -> SegmentNoise | None:
    return SegmentNoise(noise, segment.parameter) if noise is not None else None
