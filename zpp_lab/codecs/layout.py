"""A layout: where each parameter's segment lies in a payload, and which codec made it.

A unit is a module whose parameters travel together, a decoder block for instance. On a wire
with W shards each parameter of the unit is cut as FSDP2 cuts it, along dimension 0 into W
shards of ceil(d0 / W) rows, the last ones padded with zero rows or all padding. The padding
belongs to the segment: every rank's payload has the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from zpp_lab.codecs.base import Codec
from zpp_lab.codecs.noise import parameter_id


@dataclass(frozen=True)
class Parameter:
    """A parameter of a unit: its full name, its whole shape, and over how many ranks it is sharded.
    `dtype`: of integers, which travel as their own bytes on every wire; None: the wire's. `part`:
    which of `parts` tensor parts it is; of a parameter that all of them have whole, 0 of 1."""

    name: str
    shape: tuple[int, ...]
    world: int
    dtype: torch.dtype | None = None
    parts: int = 1
    part: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        if not self.shape:
            return 1
        return -(-self.shape[0] // self.world) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Segment:
    """One parameter's place in a payload row and in a row of sums."""

    name: str
    numel: int
    codec: Codec
    offset: int  # bytes, in the payload row
    nbytes: int
    coded_offset: int  # elements, in a row of sums in the rotated domain
    offset_numel: int  # elements, in a row of plain values
    part: int = 0  # tensor part

    @cached_property
    def parameter(self) -> int:
        """The parameter's id for noise."""
        return parameter_id(f"{self.name}@{self.part}" if self.part else self.name)

    @property
    def coded_numel(self) -> int:
        return self.codec.coded_numel(self.numel)


@dataclass(frozen=True)
class Layout:
    """The segments of one unit on one wire, in payload order; each is 16-byte aligned."""

    segments: tuple[Segment, ...]

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        numels: Sequence[int],
        codecs: Sequence[Codec],
        parts: Sequence[int] = (),
    ) -> Layout:
        """Place segments one behind the other. `parts`: their tensor parts; (): 0 each."""
        segments: list[Segment] = []
        offset = coded = plain = 0
        own = parts or (0,) * len(names)
        for name, numel, codec, part in zip(names, numels, codecs, own, strict=True):
            segment = Segment(name, numel, codec, offset, codec.nbytes(numel), coded, plain, part)
            segments.append(segment)
            offset, coded = offset + segment.nbytes, coded + segment.coded_numel
            plain += numel
        return cls(tuple(segments))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one payload row."""
        return sum(s.nbytes for s in self.segments)

    @cached_property
    def numel(self) -> int:
        return sum(s.numel for s in self.segments)

    @cached_property
    def coded_numel(self) -> int:
        """Elements of one row of sums in the rotated domain."""
        return sum(s.coded_numel for s in self.segments)

    @cached_property
    def stochastic(self) -> bool:
        return any(s.codec.stochastic for s in self.segments)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of segments that share codec and length, in order of first appearance."""
        found: dict[tuple[Codec, int], list[int]] = {}
        for i, segment in enumerate(self.segments):
            found.setdefault((segment.codec, segment.numel), []).append(i)
        return tuple(tuple(group) for group in found.values())

    def part(self, chosen: tuple[int, ...]) -> Layout:
        """Return some of the segments, each at its place in the whole layout's payloads and sums.
        Cached; this layout itself when all of them are chosen."""
        if len(chosen) == len(self.segments):
            return self
        parts: dict[tuple[int, ...], Layout] = self.__dict__.setdefault("_parts", {})
        if chosen not in parts:
            parts[chosen] = Layout(tuple(self.segments[i] for i in chosen))
        return parts[chosen]

    def select(self, names: Set[str]) -> Layout:
        """Return the layout of those segments alone (parameters that have a gradient)."""
        kept = [s for s in self.segments if s.name in names]
        if len(kept) == len(self.segments):
            return self
        own, numels = [s.name for s in kept], [s.numel for s in kept]
        return Layout.build(own, numels, [s.codec for s in kept], [s.part for s in kept])
