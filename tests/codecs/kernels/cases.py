"""Random and hard cases that kernels and reference must agree on, bit for bit.

The reference runs on the CPU: it is the truth. `check(seed)` draws a layout, sources and noise,
runs every operator on both and names the first difference.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Codec, Noise, NormalCodec, RawCodec
from zpp_lab.codecs.errors import SUMS
from zpp_lab.codecs.kernels import configure, cuda, memory, reference, status
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.codecs.kernels.table import has_kernel
from zpp_lab.codecs.layout import Layout

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HARD = (
    "normal", "outliers", "zeros", "minus zeros", "constant", "denormal", "tiny", "huge",
    "overflowing range", "beside the end", "below the end", "ties", "nan", "inf", "mixed",
)  # fmt: skip


def hard_rows(name: str, rows: int, numel: int, seed: int = 0) -> Tensor:
    """fp32 [rows, numel] of one kind of trouble."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, numel, generator=draw)
    pick = torch.rand(rows, numel, generator=draw)
    if name == "outliers":
        x = torch.where(pick < 0.01, x * 300, x)
    elif name == "zeros":
        x = torch.zeros_like(x)
    elif name == "minus zeros":
        x = torch.where(pick < 0.5, -0.0, 0.0)
    elif name == "constant":
        x = torch.full_like(x, -3.1415927)
    elif name == "denormal":
        x = x * 1e-40
    elif name == "tiny":
        x = x * 3e-38
    elif name == "huge":
        x = x.sign() * 3.4e38 * pick
    elif name == "overflowing range":
        x = x.sign() * 3.4028234e38
    elif name == "beside the end":  # blocks far from 0, whose rounded ends may lie beyond fp32's
        x = (3.4028234e38 * (1 - pick * 0.01)).clamp_max(torch.finfo(torch.float32).max)
    elif name == "below the end":  # where rotations and ranges begin to overflow
        x = x.sign() * torch.exp2(128 - 14 * pick).clamp_max(3.4028234e38)
    elif name == "ties":  # values on and beside the midpoints of every grid
        x = torch.randint(-255, 256, (rows, numel), generator=draw) / 2.0
        x[:, ::16] = 127.0
    elif name == "nan":
        x = torch.where(pick < 0.002, torch.nan, x)
    elif name == "inf":
        x = torch.where(pick < 0.002, x.sign() * torch.inf, x)
    elif name == "mixed":
        x = x * torch.pow(10.0, torch.randint(-30, 30, (rows, numel), generator=draw).float())
    return x


@dataclass(frozen=True)
class Case:
    seed: int
    rows: int  # R
    summed: int  # K
    before: Layout
    after: Layout

    def __str__(self) -> str:
        text = [f"seed {self.seed}, R={self.rows}, K={self.summed}"]
        for old, new in zip(self.before.segments, self.after.segments, strict=True):
            text.append(f"  {old.numel} elements: {old.codec} then {new.codec}")
        return "\n".join(text)


def random_codec(draw: random.Random) -> Codec:
    if draw.random() < 0.15:
        return RawCodec(draw.choice(FLOATS[:2]))
    block = 2 ** draw.randint(4, 13)
    widths = [w for w in (16, 32, 64, 128, 256) if w <= block]
    width = draw.choice(widths) if draw.random() < 0.3 else 0
    if draw.random() < 0.2:
        return NormalCodec(
            bits=draw.choice((2, 3, 4)),
            block_size=block,
            scale_dtype=draw.choice(("fp32", "bf16")),
            hadamard=width,
            random_signs=bool(width) and draw.random() < 0.5,
        )
    return BlockCodec(
        bits=draw.choice((2, 3, 4, 6, 8)),
        block_size=block,
        symmetric=draw.random() < 0.5,
        rounding=draw.choice(("nearest", "stochastic")),
        scale_dtype=draw.choice(("fp32", "bf16")),
        hadamard=width,
        random_signs=bool(width) and draw.random() < 0.5,
    )


def random_numel(draw: random.Random) -> int:
    kind = draw.random()
    if kind < 0.05:
        return 0
    if kind < 0.25:
        return draw.randint(1, 100)
    if kind < 0.5:
        return 2 ** draw.randint(4, 14)
    if kind < 0.8:
        return 8 * draw.randint(1, 3000)
    return draw.randint(1, 40000)


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    count = draw.choice((1, 1, 2, 3, 5, 30)) if draw.random() < 0.3 else draw.choice((1, 2))
    numels = [random_numel(draw) if count < 20 else draw.randint(0, 300) for _ in range(count)]
    names = [f"layers.{i}.weight" for i in range(count)]
    # the reference's raw codec cannot decode an empty segment
    before = [random_codec(draw) if n else BlockCodec() for n in numels]
    after = [
        c if draw.random() < 0.3 or not n else random_codec(draw)
        for c, n in zip(before, numels, strict=True)
    ]  # equal codecs keep their rotation
    rows, summed = draw.choice((1, 1, 2, 3, 4)), draw.choice((1, 2, 3, 4))
    layouts = (Layout.build(names, numels, codecs) for codecs in (before, after))
    return Case(seed, rows, summed, *layouts)


def random_tensor(
    draw: random.Random, numel: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """The same values on the CPU and on `device`, there at any alignment."""
    kind = draw.choice(HARD) if draw.random() < 0.4 else "normal"
    x = hard_rows(kind, 1, numel, draw.randrange(2**31))[0].to(dtype)
    shift = draw.choice((0, 0, 0, 1, 3, 8))
    room = torch.empty(numel + shift, dtype=dtype, device=device)[shift:]
    room.copy_(x)
    return x, room


def sources_of(
    draw: random.Random,
    layout: Layout,
    rows: int,
    device: str,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that fill their rows, or end inside the last ones."""
    pairs = []
    for segment in layout.segments:
        whole = rows * segment.numel
        short = draw.randint(0, whole) if draw.random() < 0.3 else whole
        pairs.append(random_tensor(draw, short, draw.choice(dtypes), device))
    return [p[0] for p in pairs], [p[1] for p in pairs]


def random_noise(draw: random.Random, rows: int) -> Noise:
    ranks = tuple(draw.randrange(4096) for _ in range(rows))
    return Noise(draw.getrandbits(64), ranks, tuple(draw.randrange(64) for _ in range(rows)))


@dataclass
class Held:
    """Memories of one payload's rows."""

    settings: dict[str, Memory]
    rows: dict[str, Tensor]  # as they are stored
    numels: dict[str, int]
    count: int

    def stored(self, name: str) -> Tensor | None:
        return self.rows.get(name)

    def room(self, name: str, device: torch.device) -> Tensor:
        own = self.settings[name]
        shape = self.count, own.width(self.numels[name])
        return torch.full(shape, 7, dtype=own.dtype, device=device)

    def save(self, name: str, room: Tensor) -> None:
        self.rows[name] = room


class InPlace(Held):
    """What is remembered next takes the place of what is now."""

    def room(self, name: str, device: torch.device) -> Tensor:
        return self.rows[name] if name in self.rows else super().room(name, device)


def poisoned(*shape: int, device: str = "cpu") -> Tensor:
    return torch.full(shape, 0xA5, dtype=torch.uint8, device=device)


def strided(payload: Tensor, device: str) -> Tensor:
    """uint8 [K, R, n] as a slice of a larger buffer, as a transport hands it over."""
    room = torch.empty(
        payload.shape[0], 2, payload.shape[1], payload.shape[2], dtype=torch.uint8, device=device
    )
    room[:, 1].copy_(payload)
    return room[:, 1]


def same(name: str, got: Tensor, want: Tensor) -> None:
    """Equal bits; any NaN equals any other. AssertionError with the first difference."""
    got = got.cpu()
    if got.is_floating_point():
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
        equal = (got.view(kind) == want.view(kind)) | (got.isnan() & want.isnan())
    else:
        equal = got == want
    if not bool(equal.all()):
        at = tuple(int(i) for i in (~equal).nonzero()[0])
        count = int((~equal).sum())
        raise AssertionError(
            f"{name}: {count} of {equal.numel()} differ, first at {at}: "
            f"{got[at].item()!r}, not {want[at].item()!r}"
        )


def same_payload(name: str, layout: Layout, got: Tensor, want: Tensor) -> None:
    """Equal bytes; in raw segments any NaN equals any other."""
    got = got.cpu()
    for i, s in enumerate(layout.segments):
        if not s.nbytes:
            continue
        mine, truth = (t[:, s.offset : s.offset + s.nbytes] for t in (got, want))
        if isinstance(s.codec, RawCodec):
            mine, truth = (t.contiguous().view(s.codec.dtype) for t in (mine, truth))
        same(f"{name}, segment {i}", mine, truth)


def check(seed: int, kernels: object, device: str = "cuda") -> None:
    """Every operator on one random case. `kernels` has the functions of reference.py."""
    check_case(random_case(seed), kernels, device)


def check_case(case: Case, kernels: object, device: str = "cuda") -> None:
    try:
        _check_encode(case, kernels, device)
        _check_update(case, kernels, device)
        _check_sums(case, kernels, device)
        segments = [*case.before.segments, *case.after.segments]
        known = all(has_kernel(s.codec) for s in segments)
        if known and (device == "cuda" or kernels is cuda):  # the reference has no other way
            _check_memory(case, device)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{case}") from error


def _check_encode(case: Case, ops: object, device: str) -> None:
    draw = random.Random(case.seed + 1)
    layout, noise = case.before, random_noise(draw, case.rows)
    host, there = sources_of(draw, layout, case.rows, device)
    want = poisoned(case.rows, layout.nbytes)
    truth = torch.full((case.rows, len(host), len(SUMS)), 3.0, dtype=torch.float64)
    reference.encode(layout, host, noise, want, truth)
    got = poisoned(case.rows, layout.nbytes, device=device)
    ops.encode(layout, there, noise, got)  # type: ignore[attr-defined]
    same_payload("encode", layout, got, want)
    again, errors = torch.zeros_like(got), torch.full_like(truth, 5.0, device=device)
    ops.encode(layout, there, noise, again, errors)  # type: ignore[attr-defined]
    same_payload("encode with errors", layout, again, want)
    same("errors", errors, truth)
    outs = [torch.full_like(h, 7.0).to(draw.choice(FLOATS)) for h in host]
    mine = [torch.full_like(o, 5.0, device=device) for o in outs]
    reference.decode(layout, want, outs)
    ops.decode(layout, got, mine)  # type: ignore[attr-defined]
    for i, (a, b) in enumerate(zip(mine, outs, strict=True)):
        same(f"decode {i}", a, b)


def _check_update(case: Case, ops: object, device: str) -> None:
    """New weights for those who keep some, near them or not: whole and as differences."""
    draw = random.Random(case.seed + 4)
    layout, noise = case.before, random_noise(draw, case.rows)
    for differences in (True, False):
        host, there = sources_of(draw, layout, case.rows, device, FLOATS[:1])
        dtype, near = draw.choice(FLOATS[:2]), draw.random() < 0.5
        pairs = [random_tensor(draw, len(x), dtype, device) for x in host]
        kept, mine = [p[0] for p in pairs], [p[1] for p in pairs]
        for x, m, own in zip(host, kept, mine, strict=True):
            if near:
                m.copy_(x)
                m[::3] += 1e-3
                own.copy_(m)
        want, got = (poisoned(case.rows, layout.nbytes, device=d) for d in ("cpu", device))
        reference.encode_update(layout, host, kept, differences, noise, want)
        ops.encode_update(layout, there, mine, differences, noise, got)  # type: ignore[attr-defined]
        same_payload("encode_update", layout, got, want)
        errors = torch.zeros(case.rows, len(host), len(SUMS), dtype=torch.float64, device=device)
        args = (layout, there, mine, differences, noise, again := torch.zeros_like(got), errors)
        ops.encode_update(*args)  # type: ignore[attr-defined]
        same_payload("encode_update with errors", layout, again, want)
        ok = draw.choice((None, torch.tensor(True), torch.tensor(False)))
        told = None if ok is None else ok.to(device)
        reference.decode(layout, want, kept, differences, ok)
        ops.decode(layout, got, mine, differences, told)  # type: ignore[attr-defined]
        for i, (a, b) in enumerate(zip(mine, kept, strict=True)):
            same(f"decode {i} onto, {differences}, {ok}", a, b)


def _payload(draw: random.Random, case: Case) -> Tensor:
    payload = poisoned(case.summed, case.rows, case.before.nbytes)
    for row in payload:
        host, _ = sources_of(draw, case.before, case.rows, "cpu")
        reference.encode(case.before, host, random_noise(draw, case.rows), row)
    return payload


def _check_sums(case: Case, ops: object, device: str) -> None:
    draw = random.Random(case.seed + 2)
    before, after, payload = case.before, case.after, _payload(draw, case)
    there = strided(payload, device) if draw.random() < 0.5 else payload.to(device)
    sums = torch.randn(case.rows, before.coded_numel) * draw.choice((0.0, 1.0))
    mine = sums.to(device)
    reference.decode_sum(before, payload, sums)
    ops.decode_sum(before, there, mine)  # type: ignore[attr-defined]
    same("decode_sum", mine, sums)
    same("finish_sums", ops.finish_sums(before, mine), reference.finish_sums(before, sums))  # type: ignore[attr-defined]
    dtype = draw.choice(FLOATS[:2])
    want = torch.full((case.rows, before.numel), 3.0, dtype=dtype)
    got = torch.full_like(want, 9.0, device=device)
    reference.reduce(before, payload, want)
    ops.reduce(before, there, got)  # type: ignore[attr-defined]
    same("reduce", got, want)
    noise = random_noise(draw, case.rows)
    for name, args in (
        ("encode_sums", (sums, mine)),
        ("decode_sum_encode", (payload, there)),
    ):
        want, got = (
            poisoned(case.rows, after.nbytes),
            poisoned(case.rows, after.nbytes, device=device),
        )
        getattr(reference, name)(before, after, args[0], noise, want)
        getattr(ops, name)(before, after, args[1], noise, got)
        same_payload(name, after, got, want)


def _check_memory(case: Case, device: str) -> None:
    """Both hops with memories, for two steps and a second micro-step: payloads, and what stays."""
    draw = random.Random(case.seed + 3)
    before, after = case.before, case.after
    held = memory.between(before, after)
    first, second = (
        [s for s in layout.segments if s.numel and not isinstance(s.codec, RawCodec)]
        for layout in (before, after)
    )
    settings = {
        s.name: Memory(
            draw.choice(("fp32", "bf16", "8bit")),
            draw.choice((1.0, 0.9)),
            draw.choice((0.0, 0.8)),
        )
        for s in before.segments
        if draw.random() < 0.8
    }
    kinds = Held, draw.choice((Held, InPlace))
    truth, mine = (kind({}, {}, {s.name: s.numel for s in first}, case.rows) for kind in kinds)
    for own in (truth, mine):
        own.settings = {s.name: settings[s.name] for s in first if s.name in settings}
    truths, sums = (
        kind({}, {}, {s.name: s.coded_numel for s in held.segments}, case.rows) for kind in kinds
    )
    for own in (truths, sums):
        own.settings = {s.name: settings[s.name] for s in second if s.name in settings}
    for _ in range(3):
        noise = random_noise(draw, case.rows)
        host, there = sources_of(draw, before, case.rows, device)
        want, got = (poisoned(case.rows, before.nbytes, device=d) for d in ("cpu", device))
        total = torch.randn(case.rows, held.coded_numel) * draw.choice((1e-20, 1.0))
        again, same_again = (poisoned(case.rows, after.nbytes, device=d) for d in ("cpu", device))
        backend = status()["backend"]
        configure("reference")
        memory.encode(before, host, noise, want, None, truth)
        memory.encode_sums(held, after, total, noise, again, truths)
        configure(backend)  # type: ignore[arg-type]
        memory.encode_in_one_pass(None, before, there, noise, got, mine)
        memory.encode_in_one_pass(held, after, [total.to(device)], noise, same_again, sums)
        same_payload("encode with memories", before, got, want)
        same_payload("encode_sums with memories", after, same_again, again)
        for name, a, b in (
            (n, own, t) for own, t in ((mine, truth), (sums, truths)) for n in t.rows
        ):
            same(f"memory of {name}, {a.settings[name]}", a.rows[name], b.rows[name])
