"""What an encoder remembers between steps: codecs stay maps, a memory stands before one.

With x the tensor, m the memory, d what the payload decodes to, `residual` encodes y = x + m, and
remembers a m + (1 - a) decay (y - d).

That is error feedback: what a codec has lost is sent with the next tensor (Seide, Fu, Droppo, Li
and Yu, "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy, Rebjock, Stich and
Jaggi, "Error feedback fixes SignSGD", ICML 2019, arXiv:1901.09847). With a = `average` above 0 it
is LoCo's moving average of errors, forgotten every `reset_every` steps (Xie, Lin, Toh and Zhou
2024, arXiv:2407.04480; in DeepSpeed 0.16 to 0.19.7 err_beta and reset_T).

Arithmetic is elementwise fp32, each operation rounded on its own: y - d, (1 - a) decay times it,
a m, their sum; a factor of 1 and a share of 0 are left out. Factors are rounded to fp32 once. A
memory that is not there yet is zeros.

A row of gradients is remembered as it is, its padding included. Sums between two hops are
remembered in the domain in which they are encoded: rotated, where both codecs share the rotation.

Stores, a row: fp32; bf16, rounded to nearest even; 8bit, symmetric codes of the block codec rounded
to nearest, with an fp32 scale for each block of 256.

On a GPU one kernel loads, adds, encodes, decodes and remembers (cuda/codec/memory.cu). What
telemetry looks at, and codecs that the kernels do not know, take torch's operations: equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Noise, RawCodec, kernels
from zpp_lab.codecs.kernels import cuda
from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.codecs.kernels.reference import sums_of
from zpp_lab.codecs.kernels.table import has_kernel
from zpp_lab.codecs.layout import Layout, Segment
from zpp_lab.config.codec import BLOCK_SIZE, MemoryConfig, MemoryStore

EIGHT = BlockCodec(bits=8, block_size=BLOCK_SIZE)
PLAIN = RawCodec(torch.float32)


@dataclass(frozen=True)
class Memory:
    """The settings of a memory; the module says what they do. Tensors live elsewhere."""

    store: MemoryStore = "bf16"
    decay: float = 1.0
    average: float = 0.0
    reset_every: int = 0

    @classmethod
    def of(cls, config: MemoryConfig) -> Memory | None:
        """The memory that `config` asks for; None: none."""
        if config.kind is None or config.kind == "none":
            return None
        given = {k: getattr(config, k) for k in ("store", "decay", "average", "reset_every")}
        return cls(**{k: v for k, v in given.items() if v is not None})

    def before(self, x: Tensor, m: Tensor) -> Tensor:
        """What is encoded in place of x; all fp32 of one shape."""
        return x + m

    def after(self, y: Tensor, d: Tensor, m: Tensor) -> Tensor:
        """The memory afterwards, before it is stored."""
        lost, weight = y - d, (1.0 - self.average) * self.decay
        if weight != 1.0:
            lost = lost * _factor(weight, y.device)
        return m * _factor(self.average, y.device) + lost if self.average else lost

    def resets(self, step: int) -> bool:
        """Whether step `step`, counted from 0, begins without what was remembered."""
        return self.reset_every > 0 and step > 0 and step % self.reset_every == 0

    # ------------------------------------------------------------------ stores

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored."""
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
        return kinds[self.store]

    def width(self, numel: int) -> int:
        """Elements of `dtype` that a row of `numel` elements takes."""
        return EIGHT.nbytes(numel) if self.store == "8bit" else numel

    def nbytes(self, numel: int) -> int:
        """Bytes of a row of `numel` elements."""
        return self.width(numel) * self.dtype.itemsize

    def pack(self, m: Tensor) -> Tensor:
        """fp32 [R, n] → stored rows [R, width(n)]; fp32 as it is."""
        if self.store != "8bit":
            return m.to(self.dtype)
        out = torch.empty(len(m), self.width(m.shape[1]), dtype=torch.uint8, device=m.device)
        kernels.encode(_rows(m.shape[1]), [m], None, out)
        return out

    def unpack(self, stored: Tensor, numel: int) -> Tensor:
        """Stored rows [R, width(n)] → fp32 [R, n]; fp32 as it is."""
        if self.store != "8bit":
            return stored.to(torch.float32)
        out = torch.empty(len(stored), numel, device=stored.device)
        kernels.decode(_rows(numel), stored, [out])
        return out


def _factor(value: float, device: torch.device) -> Tensor:
    """fp32, as a tensor: every device then multiplies by the same number."""
    return torch.full((), value, device=device)


@lru_cache(maxsize=1024)
def _rows(numel: int) -> Layout:
    return Layout.build(["memory"], [numel], [EIGHT])


# ---------------------------------------------------------------------- layouts


class Remembered(Protocol):
    """The memories of a payload's rows, by parameter; parameters without one are left out.
    Rows are as `Memory.pack` stores them."""

    @property
    def settings(self) -> Mapping[str, Memory]: ...

    def stored(self, name: str) -> Tensor | None:
        """What is remembered now; None stands for zeros."""
        ...

    def room(self, name: str, device: torch.device) -> Tensor:
        """Where what is remembered next is to be written, maybe the place of what is now."""
        ...

    def save(self, name: str, room: Tensor) -> None:
        """The room is written."""
        ...


def encode(
    layout: Layout,
    sources: Sequence[Tensor],
    noise: Noise | None,
    out: Tensor,
    errors: Tensor | None,
    kept: Remembered,
    looked: bool = True,
) -> list[Tensor]:
    """`kernels.encode` of what the memories make of the sources; returns that where it is `looked`
    at: a parameter with one as fp32 [R, n], the others as they came. `errors` are of it too."""
    if errors is None and not looked and _in_one_pass(None, layout, kept, out):
        encode_in_one_pass(None, layout, sources, noise, out, kept)
        return []
    given, rows = list(sources), len(out)
    together = _together(layout, kept)
    stacks = []
    for alike in together:
        numel = alike.segments[0].numel
        x = torch.cat([kernels.padded_rows(sources[i], rows, numel) for i in alike.places])
        stacks.append(alike.before(x.to(torch.float32)))
        for i, part in zip(alike.places, alike.parts(stacks[-1]), strict=True):
            given[i] = part
    kernels.encode(layout, given, noise, out, errors)
    for alike, y in zip(together, stacks, strict=True):
        codec = alike.segments[0].codec
        if codec.one_hop:  # its own row may not come back
            d = codec.sent(y)
        else:
            d = torch.empty_like(y)
            kernels.decode(layout.part(alike.places), out, alike.parts(d))
        alike.keep(kept, y, d)
    return given


def encode_sums(
    before: Layout,
    layout: Layout,
    sums: Tensor,
    noise: Noise | None,
    out: Tensor,
    kept: Remembered,
    looked: bool = True,
) -> Tensor:
    """`kernels.encode_sums` of what the memories make of the sums; returns that where it is
    `looked` at, fp32 [R, n] with the segments of `between(before, layout)`, each of whose memories
    is in its domain there."""
    held = between(before, layout)
    given = _in_domain(before, held, sums)
    if not looked and _in_one_pass(held, layout, kept, out):
        encode_in_one_pass(held, layout, [given], noise, out, kept)
        return given
    parts = [sums_of(given, segment) for segment in held.segments]
    together = _together(held, kept)
    stacks = []
    for alike in together:
        stacks.append(alike.before(torch.cat([parts[i] for i in alike.places])))
        for i, part in zip(alike.places, alike.parts(stacks[-1]), strict=True):
            parts[i] = part
    given = torch.cat(parts, dim=1) if together else given
    kernels.encode_sums(held, layout, given, noise, out)
    decoded = torch.zeros(len(out), layout.coded_numel, device=out.device)
    kernels.decode_sum(layout, out[None], decoded)
    decoded = _in_domain(layout, held, decoded)
    for alike, y in zip(together, stacks, strict=True):
        alike.keep(kept, y, torch.cat([sums_of(decoded, s) for s in alike.segments]))
    return given


def between(before: Layout, layout: Layout) -> Layout:
    """Sums of a hop with layout `before` as the next hop encodes them: a segment whose two codecs
    share their rotation stays in its domain, another one has left it."""
    pairs = list(zip(before.segments, layout.segments, strict=True))
    if all(s.codec.rotation in (None, t.codec.rotation) for s, t in pairs):
        return before
    made = layout.__dict__.get("_between")
    if made is None or made[0] is not before:
        codecs = [
            s.codec if s.codec.rotation in (None, t.codec.rotation) else PLAIN for s, t in pairs
        ]
        named = [s.name for s, _ in pairs], [s.numel for s, _ in pairs]
        made = layout.__dict__["_between"] = before, Layout.build(*named, codecs)
    found: Layout = made[1]
    return found


def _in_domain(layout: Layout, held: Layout, sums: Tensor) -> Tensor:
    """Sums of `layout`, each segment in the domain that it has in `held`."""
    pairs = list(zip(layout.segments, held.segments, strict=True))
    stays = [s.codec.rotation == t.codec.rotation for s, t in pairs]
    if all(stays):
        return sums
    left = kernels.finish_sums(layout, sums)
    parts = [
        sums_of(sums, s) if stay else left[:, s.offset_numel : s.offset_numel + s.numel]
        for (s, _), stay in zip(pairs, stays, strict=True)
    ]
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Alike:
    """Segments of one length and memory, handled one below the other: as rows do not see each other
    this changes no bit. Those of `one_hop`, whose codec says what it sends, are of one codec.
    stored: what they remember; none of them does where it is empty."""

    memory: Memory
    places: tuple[int, ...]
    segments: list[Segment]
    stored: list[Tensor]

    def parts(self, stacked: Tensor) -> list[Tensor]:
        """[G R, n] → [R, n] of each."""
        return list(stacked.chunk(len(self.places)))

    def before(self, x: Tensor) -> Tensor:
        return self.memory.before(x, self._load(x))

    def keep(self, kept: Remembered, y: Tensor, d: Tensor) -> None:
        m = self._load(y) if self.memory.average else d  # not looked at
        packed = self.memory.pack(self.memory.after(y, d, m))
        rooms = [kept.room(s.name, y.device) for s in self.segments]
        torch._foreach_copy_(rooms, self.parts(packed))
        for segment, room in zip(self.segments, rooms, strict=True):
            kept.save(segment.name, room)

    def _load(self, like: Tensor) -> Tensor:
        """fp32 of the shape of `like`."""
        if not self.stored:
            return torch.zeros_like(like)
        return self.memory.unpack(torch.cat(self.stored), like.shape[1])


def _together(layout: Layout, kept: Remembered) -> list[Alike]:
    """The segments that remember."""
    found: dict[object, list[tuple[int, Segment, Tensor | None]]] = {}
    for i, s in enumerate(layout.segments):
        if s.name in kept.settings:
            stored = kept.stored(s.name)
            takes = s.codec if s.codec.one_hop else None
            key = takes, s.numel, s.coded_numel, kept.settings[s.name], stored is None
            found.setdefault(key, []).append((i, s, stored))
    return [
        Alike(
            kept.settings[every[0][1].name],
            tuple(i for i, _, _ in every),
            [s for _, s, _ in every],
            [stored for _, _, stored in every if stored is not None],
        )
        for every in found.values()
    ]


def _in_one_pass(held: Layout | None, layout: Layout, kept: Remembered, out: Tensor) -> bool:
    """Whether the kernels do it: they know all codecs, and no raw segment remembers."""
    if not use_kernels(out):
        return False
    known = [s.codec for own in (held, layout) if own is not None for s in own.segments]
    raw = {s.name for s in layout.segments if isinstance(s.codec, RawCodec)}
    return all(map(has_kernel, known)) and raw.isdisjoint(kept.settings)


def encode_in_one_pass(
    held: Layout | None,
    layout: Layout,
    sources: Sequence[Tensor],
    noise: Noise | None,
    out: Tensor,
    kept: Remembered,
) -> None:
    """One kernel for both sides of the memories."""
    named = tuple((s.name, kept.settings.get(s.name)) for s in layout.segments)
    none = out.new_empty(0)
    now, rooms = [none] * len(named), [none] * len(named)
    for i, (name, memory) in enumerate(named):
        if memory is not None:
            stored = kept.stored(name)
            now[i] = none if stored is None else stored
            rooms[i] = kept.room(name, out.device)
    table = _settings(tuple(memory for _, memory in named))
    cuda.encode_remembering(held, layout, sources, noise, out, table, now, rooms)
    for (name, memory), room in zip(named, rooms, strict=True):
        if memory is not None:
            kept.save(name, room)


@lru_cache(maxsize=256)
def _settings(memories: tuple[Memory | None, ...]) -> Tensor:
    """As cuda/bindings/fill.h reads them: int64 [segments, 3]."""
    stores = {"fp32": 1, "bf16": 2, "8bit": 3}
    rows = [
        (stores[m.store], *_fp32_bits(m.average, (1.0 - m.average) * m.decay)) if m else (0, 0, 0)
        for m in memories
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3)


def _fp32_bits(*factors: float) -> list[int]:
    return [int(bits) for bits in torch.tensor(factors).view(torch.int32).tolist()]
