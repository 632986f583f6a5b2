"""Error feedback: an encoder's residual between steps; codecs stay stateless.

With x the tensor, m the residual, d what the payload decodes to, y = x + m is encoded, and the next
residual is a m + (1 - a) decay (y - d): what a codec has lost is sent with the next tensor (Seide,
Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy, Rebjock,
Stich and Jaggi, "Error feedback fixes SignSGD", ICML 2019, arXiv:1901.09847). With a = `average`
above 0 it is LoCo's moving average of errors, reset every `reset_every` steps (Xie, Lin, Toh and
Zhou 2024, arXiv:2407.04480; in DeepSpeed 0.16 to 0.19.7 err_beta and reset_T).

Arithmetic is elementwise fp32, each operation rounded on its own: y - d, (1 - a) decay times it,
a m, their sum; a factor of 1 and a share of 0 are left out. Factors are rounded to fp32 once. The
first residual is zeros.

A residual has a gradient row's padding too. Residuals of sums between two hops lie in the domain in
which the sums are encoded: rotated, where both codecs share the rotation.

Stores, a row: fp32; bf16, rounded to nearest even; 8bit, symmetric codes of the block codec rounded
to nearest, with an fp32 scale for each block of 256.

On a GPU one kernel loads, adds, encodes, decodes and stores (cuda/codec/memory.cu). Telemetry's
steps, and codecs that the kernels do not know, take torch's operations: equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Noise, RawCodec, kernels
from zpp_lab.codecs.kernels import cuda
from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.codecs.kernels.reference import Tensors, sums_of
from zpp_lab.codecs.kernels.table import has_kernel
from zpp_lab.codecs.layout import Layout, Segment
from zpp_lab.config.codec import BLOCK_SIZE, MemoryConfig, MemoryStore

EIGHT = BlockCodec(bits=8, block_size=BLOCK_SIZE)
PLAIN = RawCodec(torch.float32)


@dataclass(frozen=True)
class Memory:
    """Settings of a residual, see the module. `context.Memories` has the tensors."""

    store: MemoryStore = "bf16"
    decay: float = 1.0
    average: float = 0.0
    reset_every: int = 0

    @classmethod
    def of(cls, config: MemoryConfig) -> Memory | None:
        """Return the residual's settings that `config` asks for; None without a residual."""
        if config.kind is None or config.kind == "none":
            return None
        given = {k: getattr(config, k) for k in ("store", "decay", "average", "reset_every")}
        return cls(**{k: v for k, v in given.items() if v is not None})

    def before(self, x: Tensor, m: Tensor) -> Tensor:
        """Return what is encoded in place of x; all fp32 of one shape."""
        return x + m

    def after(self, y: Tensor, d: Tensor, m: Tensor) -> Tensor:
        """Return the next residual, before it is stored."""
        lost, weight = y - d, (1.0 - self.average) * self.decay
        if weight != 1.0:
            lost = lost * _factor(weight, y.device)
        return m * _factor(self.average, y.device) + lost if self.average else lost

    def resets(self, step: int) -> bool:
        """Return whether step `step`, counted from 0, begins with a residual of zeros."""
        return self.reset_every > 0 and step > 0 and step % self.reset_every == 0

    # ------------------------------------------------------------------ stores

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what is stored."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}[self.store]

    def width(self, numel: int) -> int:
        """Return the elements of `dtype` that a row of `numel` elements takes."""
        return EIGHT.nbytes(numel) if self.store == "8bit" else numel

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a row of `numel` elements."""
        return self.width(numel) * self.dtype.itemsize

    def pack(self, m: Tensor) -> Tensor:
        """Pack fp32 [R, n] into stored rows [R, width(n)]; the same tensor for fp32."""
        if self.store != "8bit":
            return m.to(self.dtype)
        out = torch.empty(len(m), self.width(m.shape[1]), dtype=torch.uint8, device=m.device)
        kernels.encode(_rows(m.shape[1]), [m], None, out)
        return out

    def unpack(self, stored: Tensor, numel: int) -> Tensor:
        """Unpack stored rows [R, width(n)] into fp32 [R, n]; the same tensor for fp32."""
        if self.store != "8bit":
            return stored.to(torch.float32)
        out = torch.empty(len(stored), numel, device=stored.device)
        kernels.decode(_rows(numel), stored, [out])
        return out


def _factor(value: float, device: torch.device) -> Tensor:
    """Return a factor as an fp32 tensor: every device then multiplies by the same number."""
    return torch.full((), value, device=device)


@lru_cache(maxsize=1024)
def _rows(numel: int) -> Layout:
    return Layout.build(["memory"], [numel], [EIGHT])


# ---------------------------------------------------------------------- layouts


class Remembered(Protocol):
    """Residuals of a payload's rows, as `Memory.pack` stores them, by parameter that has one."""

    @property
    def settings(self) -> Mapping[str, Memory]: ...

    def stored(self, name: str) -> Tensor | None:
        """Return the present residual; None stands for zeros."""
        ...

    def room(self, name: str, device: torch.device) -> Tensor:
        """Return where the next residual is to be written, possibly over the present one."""
        ...

    def save(self, name: str, room: Tensor) -> None:
        """Take the written residual."""
        ...


def encode(
    layout: Layout,
    sources: Tensors,
    noise: Noise | None,
    out: Tensor,
    errors: Tensor | None,
    kept: Remembered,
    observed: bool = True,
) -> list[Tensor]:
    """Encode sources with their residuals, and store the next ones. Returns what was encoded if
    `observed`: fp32 [R, n] of a parameter with a residual, others as given. `errors` compares with
    that too."""
    if errors is None and not observed and _in_one_pass(None, layout, kept, out):
        encode_in_one_pass(None, layout, sources, noise, out, kept)
        return []
    given, rows = list(sources), len(out)
    together = _stacked(layout, kept)
    stacks = []
    for stack in together:
        numel = stack.segments[0].numel
        x = torch.cat([kernels.padded_rows(sources[i], rows, numel) for i in stack.places])
        stacks.append(stack.before(x.to(torch.float32)))
        for i, part in zip(stack.places, stack.parts(stacks[-1]), strict=True):
            given[i] = part
    kernels.encode(layout, given, noise, out, errors)
    for stack, y in zip(together, stacks, strict=True):
        codec = stack.segments[0].codec
        if codec.one_hop:  # its own row may not come back
            d = codec.sent(y)
        else:
            d = torch.empty_like(y)
            kernels.decode(layout.part(stack.places), out, stack.parts(d))
        stack.keep(kept, y, d)
    return given


def encode_sums(
    before: Layout,
    layout: Layout,
    sums: Tensor,
    noise: Noise | None,
    out: Tensor,
    kept: Remembered,
    observed: bool = True,
) -> Tensor:
    """Encode sums of a hop with their residuals, and store the next ones. Returns what was encoded
    where `observed`: fp32 [R, n] with the segments of `between(before, layout)`, in whose domain
    each residual lies."""
    held = between(before, layout)
    given = _in_domain(before, held, sums)
    if not observed and _in_one_pass(held, layout, kept, out):
        encode_in_one_pass(held, layout, [given], noise, out, kept)
        return given
    parts = [sums_of(given, segment) for segment in held.segments]
    together = _stacked(held, kept)
    stacks = []
    for stack in together:
        stacks.append(stack.before(torch.cat([parts[i] for i in stack.places])))
        for i, part in zip(stack.places, stack.parts(stacks[-1]), strict=True):
            parts[i] = part
    given = torch.cat(parts, dim=1) if together else given
    kernels.encode_sums(held, layout, given, noise, out)
    decoded = torch.zeros(len(out), layout.coded_numel, device=out.device)
    kernels.decode_sum(layout, out[None], decoded)
    decoded = _in_domain(layout, held, decoded)
    for stack, y in zip(together, stacks, strict=True):
        stack.keep(kept, y, torch.cat([sums_of(decoded, s) for s in stack.segments]))
    return given


def between(before: Layout, layout: Layout) -> Layout:
    """Return the layout of a hop's sums as the next hop encodes them: a segment whose two codecs
    share their rotation stays in its domain, others have left it."""
    pairs = list(zip(before.segments, layout.segments, strict=True))
    if all(s.codec.rotation in (None, t.codec.rotation) for s, t in pairs):
        return before
    made = layout.__dict__.get("_between")
    if made is None or made[0] is not before:
        same = [s.codec.rotation in (None, t.codec.rotation) for s, t in pairs]
        codecs = [s.codec if stays else PLAIN for (s, _), stays in zip(pairs, same, strict=True)]
        named = [s.name for s, _ in pairs], [s.numel for s, _ in pairs]
        made = layout.__dict__["_between"] = before, Layout.build(*named, codecs)
    found: Layout = made[1]
    return found


def _in_domain(layout: Layout, held: Layout, sums: Tensor) -> Tensor:
    """Return sums of `layout`, each segment in the domain that it has in `held`."""
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
class Stacked:
    """Segments of one length and one residual's settings, stacked, which changes no bit. Segments
    of `one_hop` share their codec. stored: residuals, empty if all zeros."""

    memory: Memory
    places: tuple[int, ...]
    segments: list[Segment]
    stored: list[Tensor]

    def parts(self, stacked: Tensor) -> list[Tensor]:
        """Split [G R, n] into [R, n] of each."""
        return list(stacked.chunk(len(self.places)))

    def before(self, x: Tensor) -> Tensor:
        return self.memory.before(x, self._load(x))

    def keep(self, kept: Remembered, y: Tensor, d: Tensor) -> None:
        m = self._load(y) if self.memory.average else d  # not looked at
        packed = self.memory.pack(self.memory.after(y, d, m))
        targets = [kept.room(s.name, y.device) for s in self.segments]
        torch._foreach_copy_(targets, self.parts(packed))
        for segment, room in zip(self.segments, targets, strict=True):
            kept.save(segment.name, room)

    def _load(self, like: Tensor) -> Tensor:
        """Return the residuals, fp32 of the shape of `like`."""
        if not self.stored:
            return torch.zeros_like(like)
        return self.memory.unpack(torch.cat(self.stored), like.shape[1])


def _stacked(layout: Layout, kept: Remembered) -> list[Stacked]:
    """Group the segments that have residuals."""
    found: dict[object, list[tuple[int, Segment, Tensor | None]]] = {}
    for i, s in enumerate(layout.segments):
        if s.name in kept.settings:
            stored = kept.stored(s.name)
            takes = s.codec if s.codec.one_hop else None
            key = takes, s.numel, s.coded_numel, kept.settings[s.name], stored is None
            found.setdefault(key, []).append((i, s, stored))
    return [
        Stacked(
            kept.settings[every[0][1].name],
            tuple(i for i, _, _ in every),
            [s for _, s, _ in every],
            [stored for _, _, stored in every if stored is not None],
        )
        for every in found.values()
    ]


def _in_one_pass(held: Layout | None, layout: Layout, kept: Remembered, out: Tensor) -> bool:
    """Return whether the kernels do it: they know all codecs, and no raw segment has a residual."""
    if not use_kernels(out):
        return False
    known = [s.codec for own in (held, layout) if own is not None for s in own.segments]
    raw = {s.name for s in layout.segments if isinstance(s.codec, RawCodec)}
    return all(map(has_kernel, known)) and raw.isdisjoint(kept.settings)


def encode_in_one_pass(
    held: Layout | None,
    layout: Layout,
    sources: Tensors,
    noise: Noise | None,
    out: Tensor,
    kept: Remembered,
) -> None:
    """Run the one kernel that adds residuals, encodes, and stores the next ones."""
    named = tuple((s.name, kept.settings.get(s.name)) for s in layout.segments)
    none = out.new_empty(0)
    now, targets = [none] * len(named), [none] * len(named)
    for i, (name, memory) in enumerate(named):
        if memory is not None:
            stored = kept.stored(name)
            now[i] = none if stored is None else stored
            targets[i] = kept.room(name, out.device)
    table = _settings(tuple(memory for _, memory in named))
    cuda.encode_remembering(held, layout, sources, noise, out, table, now, targets)
    for (name, memory), room in zip(named, targets, strict=True):
        if memory is not None:
            kept.save(name, room)


@lru_cache(maxsize=256)
def _settings(memories: tuple[Memory | None, ...]) -> Tensor:
    """Return the settings as cuda/bindings/fill.h reads them: int64 [segments, 3]."""
    stores = {"fp32": 1, "bf16": 2, "8bit": 3}
    rows = [
        (stores[m.store], *_fp32_bits(m.average, (1.0 - m.average) * m.decay)) if m else (0, 0, 0)
        for m in memories
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3)


def _fp32_bits(*factors: float) -> list[int]:
    return [int(bits) for bits in torch.tensor(factors).view(torch.int32).tolist()]
