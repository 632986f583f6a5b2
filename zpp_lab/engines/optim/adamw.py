"""AdamW that keeps its moments as `states.py` says.

Plain torch operators define it; on a GPU a kernel (`update.py`) takes their place, with the same
bits in one pass over memory where the operators take tens, and no temporaries.
Every operation is elementwise or stays inside a block of a row, and each rounds by itself, so a
shard's update is the whole tensor's to the bit. The host never waits for the device: step numbers
and the decision whether an update happens are tensors. Operators work through rows in batches, so
their temporaries stay below `BATCH` elements times `SCRATCH` bytes whatever the model's size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from zpp_lab.codecs.planes import joined, row_marks, split
from zpp_lab.config.residence import PLANES, Plane
from zpp_lab.engines.optim import host
from zpp_lab.engines.optim import update as kernel
from zpp_lab.engines.optim.host import Piece
from zpp_lab.engines.optim.shards import gradients, local, sharded_as
from zpp_lab.engines.optim.states import (
    DTYPES,
    MOMENTS,
    SCALE,
    StateKind,
    blocks_of,
    decode,
    encode,
    kind_of,
    noise_key,
    row_noise,
    to_bf16,
)

BATCH = 2**23
SCRATCH = 20  # bytes an element: two moments, the update and what encoding takes
SPLITTING = 24  # more for masters in two planes: gradient, weight and what splitting takes
SPREAD = 2**16  # rows start at so many places of a step's noise


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows of a parameter on this rank; all tensors are views [rows, n] or [rows, k]."""

    kind: StateKind
    group: dict[str, Any]
    weight: Tensor
    low: Tensor | None  # of a weight in two planes
    grad: Tensor
    factor: Tensor | None  # what the gradient is multiplied by, fp32 scalar
    rate: Tensor  # fp32 scalar: the learning rate over the first moment's bias correction
    root: Tensor  # fp32 scalar: root of the second moment's bias correction
    state: dict[str, Tensor]
    noise: Tensor  # int32 [n]


class CompactAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's formula with moments in bf16 or 8 bits; weights and sums are fp32.
    Parameters are fp32 tensors or DTensors cut along dimension 0, or the high planes of such, all
    of them; then `low` has the others, and gradients are bf16. `step` needs the number of the
    training step, which with `seed` decides how moments are rounded. `far`: the parameters of which
    `moments`, `masters` (their low planes), `gradients` or `weights` (the parameters themselves)
    lie in host memory; these pass through the parameters' device (`host.py`), with the same bits.
    `high`: these weights with their shards' padding."""

    def __init__(
        self,
        params: Iterable[Any],
        kind: StateKind,
        seed: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        far: Mapping[Plane, Set[Tensor]] | None = None,
        low: Mapping[Tensor, Tensor] | None = None,
        high: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.kind, self.seed, self.low, self.high = kind, seed, low or {}, high or {}
        self.far: dict[Plane, Set[Tensor]] = {p: (far or {}).get(p, set()) for p in PLANES}
        # row_marks of high planes that others may write, after their last update
        self.marked: dict[Tensor, Tensor] = {}
        self.grads: Mapping[Tensor, Tensor] = {}  # of the parameters under way
        self.near: dict[Piece[Tensor], dict[str, Tensor]] = {}  # what came from host memory
        # of `high` what an update left on the device, for gathers
        self.fresh: dict[Tensor, Tensor] = {}
        self.number = 0  # of the step that `begin` began, as are these three
        self.ok: Tensor | None = None
        self.factor: Tensor | None = None
        self.noise: Tensor | None = None
        # of `prepare`: `rate` and `root`, fp32 [2, parameters], and where each parameter has its
        # own; by places, these as a tensor on the device
        self.corrections: Tensor | None = None
        self.places: dict[Tensor, int] = {}
        self.indices: dict[tuple[int, ...], Tensor] = {}
        # Kept from step to step: torch keeps what a stream has freed for that stream alone, so
        # with new ones in every step tens of stages would lie about.
        passes = any(self.far.values()) or self.high
        self.streams = host.Streams(self.device) if passes else None
        every = [p for group in self.param_groups for p in group["params"]]
        self.offsets = {p: 7919 * i % SPREAD for i, p in enumerate(every)}
        self.kinds = {p: kind_of(p.shape, kind) for p in every}
        self.widest = max(prod(p.shape[1:]) for p in every)

    @property
    def device(self) -> torch.device:
        """Where parameters lie, all in one place but for `high`, and what updates them."""
        found: torch.device = self.param_groups[0]["params"][0].device
        return found

    def zero_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before its first update, sharded as it is."""
        kind, device, far = kind_of(p.shape, self.kind), self.device, p in self.far["moments"]
        own, wide = tuple(local(p).shape), (blocks_of(p.shape),)
        state = {"step": torch.zeros((), device=device)}
        for moment in MOMENTS:
            made = host.zeros(own, DTYPES[kind], device, far)
            state[moment] = sharded_as(p, made, p.shape)
            if kind == "8bit":
                made = host.zeros((own[0], *wide), torch.float32, device, far)
                state[moment + SCALE] = sharded_as(p, made, (p.shape[0], *wide))
        return state

    def step(self, closure: None = None, *, number: int = 0, ok: Tensor | None = None) -> None:  # type: ignore[override]
        """Update with the gradients that are there. `number`: of the training step.
        Where `ok` (bool scalar on the parameters' device) is false, nothing changes."""
        assert closure is None
        self.begin(number, ok)
        self.update(gradients(self))

    def begin(self, number: int, ok: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Begin a step, in which `update` takes each parameter once. Gradients are multiplied by
        `factor`, an fp32 scalar."""
        self.number, self.ok, self.noise, self.corrections = number, ok, None, None
        self.factor = None if factor is None else factor.to(self.device)

    @torch.no_grad()
    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Count the step of all parameters that `update` takes one after another, and find what it
        needs of their numbers. Each unit's update would launch tens of small kernels for that, and
        next to a forward each of them waits for a multiprocessor. Before first updates: nothing."""
        wanted = set(parameters)
        trained = [[p for p in group["params"] if p in wanted] for group in self.param_groups]
        every = [p for ps in trained for p in ps]
        if not every or any(p not in self.state for p in every):
            return
        self._count(every)
        pairs = zip(self.param_groups, trained, strict=True)
        found = [torch.stack(self._corrections(group, ps)) for group, ps in pairs if ps]
        self.corrections = torch.cat(found, dim=1)
        self.places = {p: i for i, p in enumerate(every)}

    def _count(self, parameters: Sequence[Tensor]) -> None:
        """Add 1 to step numbers of updates that happen."""
        steps = [self.state[p]["step"] for p in parameters]
        if self.ok is None:
            torch._foreach_add_(steps, 1.0)
        else:  # as a list: with one tensor torch would wait for the device
            torch._foreach_add_(steps, [self.ok.to(torch.float32)] * len(steps))

    @torch.no_grad()
    def update(self, grads: Mapping[Tensor, Tensor], whole: bool = True) -> list[Any]:
        """Update parameters with these gradients of their rows, which may be overwritten. `whole`:
        the current stream waits until all is where it belongs. Else it does not wait: returns the
        events after which weights are new, in `fresh` too, and gradients have been read."""
        trained = [[p for p in group["params"] if p in grads] for group in self.param_groups]
        every = [p for ps in trained for p in ps]
        for p in every:
            if p not in self.state:
                self.state[p] = self.zero_state(p)
        if not every:
            return []
        if self.corrections is None:
            self._count(every)
        if self.noise is None and not kernel.serves(self.state[every[0]]["step"]):
            # one strip; rows read it from places of their own
            self.noise = row_noise(self.seed, self.number, SPREAD + self.widest, self.device)
        self.grads, self.fresh = grads, {}
        passing = any(p in far for far in self.far.values() for p in every)
        ends: list[Any] = []
        if passing:
            assert self.streams is not None
            self.streams.follow(every)
            groups = [(group, {*ps}) for group, ps in zip(self.param_groups, trained, strict=True)]
            for part in host.stages(every, self._nbytes, self._cuts):
                with self.streams.next([c.item for c in part]), self._passing(part, whole):
                    for group, own in groups:
                        self._change(group, [c for c in part if c.item in own])
                    ends += self.streams.mark()
        else:
            for group, parameters in zip(self.param_groups, trained, strict=True):
                self._change(group, [Piece(p) for p in parameters])
        self.grads = {}
        if passing and self.streams is not None and whole:
            self.streams.join()
        return [] if whole else ends

    def _change(self, group: dict[str, Any], pieces: list[Piece[Tensor]]) -> None:
        """Update pieces and what `_parts` returns; without noise by the kernel. Low planes of rows
        that others have written count as 0."""
        known = [piece for piece in pieces if piece.item in self.marked]
        written = [(c, c.of(local(c.item)), c.of(self.marked[c.item])) for c in known]
        for piece, own, marks in written:
            changed = row_marks(own) != marks
            self._parts(piece)["low"].masked_fill_(changed.view(-1, *[1] * (own.ndim - 1)), 0)
        if self.noise is None:
            self._by_kernel(group, pieces)
        else:
            blocks = self._row_blocks(group, pieces, self.noise)
            for batch in host.together(blocks, lambda block: block.weight.numel(), BATCH):
                _update(batch, self.ok)
        for _, own, marks in written:
            marks.copy_(row_marks(own))

    @contextmanager
    def _passing(self, pieces: list[Piece[Tensor]], whole: bool) -> Iterator[None]:
        """Move what lies in host memory to the device for the body, and all but gradients back."""
        far = {piece: self._far(piece) for piece in pieces}
        self.near = {
            piece: {k: v.to(self.device, non_blocking=True, copy=True) for k, v in parts.items()}
            for piece, parts in far.items()
        }
        yield
        for piece, parts in far.items():
            for key, value in parts.items():
                near = self.near[piece][key]
                if key != "grad":
                    value.copy_(near, non_blocking=True)
                if key == "weight" and not whole:
                    self.fresh[piece.item] = near
                else:
                    host.vacate(near)
        self.near = {}

    def _parts(self, piece: Piece[Tensor]) -> dict[str, Tensor]:
        """Return moments and scales of its rows, `grad`, `low` and `weight` (perhaps padded),
        where the update finds them."""
        p = piece.item
        found = {k: local(v) for k, v in self.state[p].items() if k != "step"}
        found["grad"] = self.grads[p]
        found["weight"] = self.high[p] if p in self.high else local(p).detach()
        if self.low:
            found["low"] = local(self.low[p])
        return {k: piece.of(v) for k, v in found.items()} | self.near.get(piece, {})

    def _rows(self, p: Tensor, weight: Tensor) -> Tensor:
        """Return a weight of `_parts` without padding."""
        return weight[: len(local(p))] if p in self.high else weight

    def _far(self, piece: Piece[Tensor]) -> dict[str, Tensor]:
        """Return what lies in host memory of these."""
        planes: dict[str, Plane] = {"grad": "gradients", "low": "masters", "weight": "weights"}
        parts = self._parts(piece).items()
        return {key: v for key, v in parts if piece.item in self.far[planes.get(key, "moments")]}

    def _nbytes(self, p: Tensor) -> int:
        return sum(v.nbytes for v in self._far(Piece(p)).values())

    def _cuts(self, p: Tensor) -> int:
        """Return into how many pieces it may be cut: a gather reads weights of `high` whole."""
        return 1 if p in self.high or not p.ndim else len(local(p))

    def _by_kernel(self, group: dict[str, Any], pieces: list[Piece[Tensor]]) -> None:
        """Launch the kernel once for the pieces with one kind of moments."""
        same: dict[StateKind, list[Piece[Tensor]]] = defaultdict(list)
        for piece in pieces:
            same[self.kinds[piece.item]].append(piece)
        for alike in same.values():
            parts, some = [self._parts(piece) for piece in alike], [piece.item for piece in alike]
            lists = {k: [each[k] for each in parts] for k in parts[0]}
            kernel.launch(
                [self._rows(p, w) for p, w in zip(some, lists.pop("weight"), strict=True)],
                lists.pop("low", ()),
                lists.pop("grad"),
                lists,
                [self.offsets[p] for p in some],
                group,
                *self._corrections(group, some),
                noise_key(self.seed, self.number),
                self.ok,
                self.factor,
            )

    def _corrections(
        self, group: dict[str, Any], parameters: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return `rate` and `root` of each parameter's row blocks, fp32 [parameters] each."""
        if self.corrections is not None:
            where = tuple(self.places[p] for p in parameters)
            if where not in self.indices:
                self.indices[where] = torch.tensor(where, device=self.device)
            rates, roots = self.corrections.index_select(1, self.indices[where]).unbind()
            return rates, roots
        steps = torch.stack([self.state[p]["step"] for p in parameters]).double()
        beta1, beta2 = group["betas"]
        return (group["lr"] / (1 - beta1**steps)).float(), (1 - beta2**steps).sqrt().float()

    def _row_blocks(
        self, group: dict[str, Any], pieces: list[Piece[Tensor]], noise: Tensor
    ) -> Iterator[RowBlock]:
        if not pieces:
            return
        rates, roots = (t.unbind() for t in self._corrections(group, [c.item for c in pieces]))
        for piece, rate, root in zip(pieces, rates, roots, strict=True):
            p = piece.item
            kind, n = self.kinds[p], prod(p.shape[1:])
            state = self._parts(piece)
            grad, below = state.pop("grad"), state.pop("low", None)
            weight = self._rows(p, state.pop("weight"))
            wide = 1 if kind == "fp32" else n  # in fp32 rows mean nothing
            own = noise[self.offsets[p] :][:n]
            rows, each = weight.numel() // wide, max(1, BATCH // wide)
            flat = {k: v.reshape(rows, -1) for k, v in state.items()} if rows else {}
            for first in range(0, rows, each):
                part = slice(first, first + each)
                w, g = weight.view(rows, wide)[part], grad.reshape(rows, wide)[part]
                low = None if below is None else below.view(rows, wide)[part]
                states = {k: v[part] for k, v in flat.items()}
                yield RowBlock(kind, group, w, low, g, self.factor, rate, root, states, own)


def _update(batch: list[RowBlock], ok: Tensor | None) -> None:
    """Apply torch.optim.AdamW's formula, each product and sum rounded by itself."""
    group = batch[0].group
    beta1, beta2 = group["betas"]
    grads = [_gradient(p) for p in batch]
    first = [_moment(p, MOMENTS[0]) for p in batch]
    second = [_moment(p, MOMENTS[1]) for p in batch]
    torch._foreach_mul_(first, beta1)
    update = torch._foreach_mul(grads, 1 - beta1)
    torch._foreach_add_(first, update)
    torch._foreach_mul_(second, beta2)
    torch._foreach_copy_(update, grads)
    torch._foreach_mul_(update, grads)
    torch._foreach_mul_(update, 1 - beta2)
    torch._foreach_add_(second, update)
    torch._foreach_copy_(update, second)
    torch._foreach_sqrt_(update)
    for u, block in zip(update, batch, strict=True):
        u.div_(block.root)
    torch._foreach_add_(update, group["eps"])
    for u, m, block in zip(update, first, batch, strict=True):
        torch.div(m, u, out=u).mul_(block.rate)
    for block, m, v in zip(batch, first, second, strict=True):
        _keep(block, MOMENTS[0], m, ok)
        _keep(block, MOMENTS[1], v, ok)
    del first, second
    weights, decay = [p.weight for p in batch], 1 - group["lr"] * group["weight_decay"]
    if ok is None and batch[0].low is None:
        torch._foreach_mul_(weights, decay)
        torch._foreach_sub_(weights, update)
        return
    for block, u in zip(batch, update, strict=True):
        if block.low is None:
            _put(block.weight, (block.weight * decay).sub_(u), ok)
            continue
        high, low = split(joined(block.weight, block.low).mul_(decay).sub_(u))
        _put(block.weight, high, ok)
        _put(block.low, low, ok)


def _gradient(block: RowBlock) -> Tensor:
    """Return the gradient, fp32 [rows, n]; one in fp32 may be overwritten."""
    found = block.grad.to(torch.float32)
    return found if block.factor is None else found.mul_(block.factor)


def _moment(block: RowBlock, name: str) -> Tensor:
    """Return a moment as a fresh fp32 tensor [rows, n]."""
    kept = block.state[name]
    if block.kind == "8bit":
        return decode(kept, block.state[name + SCALE], signed=name == MOMENTS[0])
    return kept.to(torch.float32, copy=True)


def _keep(block: RowBlock, name: str, value: Tensor, ok: Tensor | None) -> None:
    """Write a moment back as its state keeps it. Overwrites `value`."""
    if block.kind == "8bit":
        first = name == MOMENTS[0]
        codes, scale = encode(value, signed=first, noise=None if first else block.noise)
        _put(block.state[name], codes, ok)
        _put(block.state[name + SCALE], scale, ok)
        return
    if block.kind == "bf16":
        value = to_bf16(value, block.noise)
    _put(block.state[name], value, ok)


def _put(into: Tensor, value: Tensor, ok: Tensor | None) -> None:
    into.copy_(value if ok is None else torch.where(ok, value, into))
