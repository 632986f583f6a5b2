"""A layout as kernels see it: one int64 row a segment, made once and kept with the layout.

The columns are the enum `Column` of cuda/bindings/fill.h. Segments whose codec comes from another
package have no row: `others` lists them, and their own torch code runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zpp_lab.codecs.base import Codec, RawCodec
from zpp_lab.codecs.families.block import BlockCodec
from zpp_lab.codecs.families.normal import NormalCodec
from zpp_lab.codecs.layout import Layout, Segment

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STORES = {torch.float32: 1, torch.bfloat16: 2}  # of what nodes keep, see Store in plan.h
ROUNDED = 4
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Table:
    """`rows` int64 [kernel segments, columns] on the host; indices of both kinds of segments."""

    rows: Tensor
    kernel: tuple[int, ...]
    others: tuple[int, ...]


def incoming(layout: Layout) -> Table:
    """Return the table for payloads that are read: codecs as sources, floats as destinations."""
    return _cached(layout, "_incoming", layout, None)


def outgoing(layout: Layout) -> Table:
    """Return the table for payloads that are written: floats as sources, codecs as destinations."""
    return _cached(layout, "_outgoing", None, layout)


def hop(before: Layout, after: Layout) -> Table:
    """Return the table from the sums or payloads of `before` to the payloads of `after`."""
    kept = after.__dict__.get("_hop")
    if kept is None or kept[0] is not before:
        kept = (before, _build(before, after))
        after.__dict__["_hop"] = kept
    return kept[1]


def update_settings(layout: Layout, kept: torch.dtype, differences: bool) -> Tensor | None:
    """Return how masters become what is encoded for nodes that keep weights in a dtype of STORES:
    int64 [segments, 3] as cuda/bindings/fill.h reads it; None: masters unchanged."""
    made: dict[object, Tensor | None] = layout.__dict__.setdefault("_update", {})
    if (kept, differences) not in made:
        rows = [[_change(s.codec, kept, differences), 0, 0] for s in layout.segments]
        changed = any(row[0] for row in rows)
        made[kept, differences] = torch.tensor(rows, dtype=torch.int64) if changed else None
    return made[kept, differences]


def _change(codec: Codec, kept: torch.dtype, differences: bool) -> int:
    raw = codec.dtype if isinstance(codec, RawCodec) else None
    if differences:
        return STORES[kept] if raw is None else 0
    return ROUNDED if kept == torch.bfloat16 and kept != raw else 0


def _cached(layout: Layout, name: str, before: Layout | None, after: Layout | None) -> Table:
    table = layout.__dict__.get(name)
    if table is None:
        table = layout.__dict__[name] = _build(before, after)
    return table


def _build(before: Layout | None, after: Layout | None) -> Table:
    reads = before.segments if before else (None,) * len(after.segments)  # type: ignore[union-attr]
    writes = after.segments if after else (None,) * len(reads)
    rows, kernel, others = [], [], []
    for i, (old, new) in enumerate(zip(reads, writes, strict=True)):
        if all(s is None or has_kernel(s.codec) for s in (old, new)):
            kernel.append(i)
            rows.append(_row(old, new))
        else:
            others.append(i)
    table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 14)
    return Table(table, tuple(kernel), tuple(others))


def has_kernel(codec: Codec) -> bool:
    """Return whether the kernels know the codec; a subclass may change anything."""
    if type(codec) is RawCodec:
        return codec.dtype in DTYPES
    return type(codec) in (BlockCodec, NormalCodec)


def _row(old: Segment | None, new: Segment | None) -> list[int]:
    some = old or new
    assert some is not None
    assert old is None or new is None or old.numel == new.numel
    return [
        some.numel,
        old.coded_numel if old else some.numel,
        new.coded_numel if new else some.numel,
        old.offset if old else 0,
        old.nbytes if old else 0,
        new.offset if new else 0,
        new.nbytes if new else 0,
        old.coded_offset if old else 0,
        some.offset_numel,
        (new or some).parameter,
        _pack(old.codec) if old else 0,
        _pack(new.codec) if new else 0,
        _raw_dtype(old.codec) if old else 0,
        _raw_dtype(new.codec) if new else 0,
    ]


def _pack(codec: Codec) -> int:
    """Return the eight bytes of `Codec` in cuda/layout/plan.h as an integer."""
    if isinstance(codec, RawCodec):
        return 1
    assert isinstance(codec, BlockCodec)
    fields = (
        0,
        codec.bits,
        codec.block_size.bit_length() - 1,
        2 if isinstance(codec, NormalCodec) else codec.symmetric,
        codec.scale_dtype == "bf16",
        codec.hadamard.bit_length() - 1 if codec.hadamard else 0,
        codec.random_signs,
        codec.stochastic,
    )
    return int.from_bytes(bytes(fields), "little")


def _raw_dtype(codec: Codec) -> int:
    return DTYPES[codec.dtype] if isinstance(codec, RawCodec) else 0


def signed(key: int) -> int:
    """Return a 64-bit key as the int64 that an operator takes."""
    return key - 2**64 if key > _MAX_INT64 else key


@lru_cache(maxsize=256)
def noise_rows(ranks: tuple[int, ...], rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return rank and row of each payload row, int32 [R, 2] on `device`, uploaded once."""
    return torch.tensor(list(zip(ranks, rows, strict=True)), dtype=torch.int32, device=device)
