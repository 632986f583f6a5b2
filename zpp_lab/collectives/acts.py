"""What the tensor parts of a model exchange: layouts, closed forms of bytes, and the transfers.

Between blocks each part has a slice of a micro-batch's tokens (sequence parallelism). A gather
brings every part all tokens: each encodes its slice once, and decodes all slices, its own too. A
scatter sums what the parts have made of all tokens: each encodes a row for every part, and sums the
rows it receives in fp32, in the parts' order from +0, rounded once. Backward of a gather is a
scatter, and that of a scatter a gather, on a wire of its own.

The loss over a vocabulary in parts, and the sums of gradients of parameters that all parts have,
travel in fp32 on `tp_raw`. Evaluation sends uncompressed activations, and the ledger counts none of
its bytes.

A place is one exchange of a forward, by name. Where D ranks read batches and a slice takes r bytes,
a forward sends tp (tp - 1) r D bytes at each place, and so does a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zpp_lab.codecs import RawCodec, ShamCodec, kernels
from zpp_lab.codecs.base import Codec
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock, EncodeObserver
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.traffic import Leg, Traffic
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, TP_RAW, Wire

if TYPE_CHECKING:  # plans import no process groups
    from zpp_lab.collectives.transport import Collectives

FP32 = 4
LOSS = 3  # numbers a token: largest logit, sum of exponentials, the target's logit


@dataclass(frozen=True)
class PartsPlan:
    """What a step's exchanges between `tp` tensor parts send. tokens: of a micro-batch; shared:
    elements of a rank's shards of parameters that all parts have, padding included."""

    recipe: Recipe
    tp: int
    tokens: int
    dim: int
    blocks: int
    shared: int
    micro_steps: int
    ends: int = 2  # of embedding and head, how many these ranks have
    last: bool = True  # whether these ranks compute the loss
    bits_only: bool = False  # only what codecs make smaller

    @property
    def places(self) -> int:
        """Count a forward's exchanges: a gather and a scatter for each of a block's two pieces, the
        embedding's scatter and the head's gather."""
        return 4 * self.blocks + self.ends

    def traffic(self, each: int) -> Traffic:
        """Return what all ranks send where each gives every other part `each` bytes."""
        return Traffic(self.tp * (self.tp - 1) * each * self.recipe.cluster.world, 0)

    def legs(self) -> list[Leg]:
        """Return what a step sends, a leg for each size of slices on a wire."""
        found: list[Leg] = []
        for wire in (ACTS_FORWARD, ACTS_BACKWARD):
            numel = self.tokens * self.dim // self.tp
            layout = acts_layout("", numel, self.recipe.acts_codec(wire))
            traffic = self.traffic(layout.nbytes)
            found.append(Leg(wire, layout, traffic, self.places * self.micro_steps))
        losses = self.micro_steps if self.last else 0
        for numel, times in ((LOSS * self.tokens, losses), (self.shared, 1)):
            layout = acts_layout("", numel, RawCodec(torch.float32))
            found.append(Leg(TP_RAW, layout, self.traffic(FP32 * numel), times))
        return coded(found) if self.bits_only else found


def acts_layout(place: str, numel: int, codec: Codec) -> Layout:
    return Layout.build([place], [numel], [codec])


def coded(legs: Iterable[Leg]) -> list[Leg]:
    """Keep what a codec makes smaller."""
    plain = RawCodec, ShamCodec
    return [leg for leg in legs if not isinstance(leg.layout.segments[0].codec, plain)]


class ActsPlan(Protocol):
    """What an encoder needs of a plan of tensor parts or of stages."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def tp(self) -> int: ...


class ActsEncoder:
    """Encodes activations of the tensor parts that read one batch; a whole model is one part.

    `reader`: the batch's place among those of a micro-step. `plain`: activations travel
    uncompressed, and the ledger counts nothing. `observe`: returns a part's observer, which gets
    the errors of what the part encodes; None without telemetry.
    """

    def __init__(self, plan: ActsPlan, clock: Clock, ledger: Ledger) -> None:
        self.plan, self.tp, self.clock, self.ledger = plan, plan.tp, clock, ledger
        self.reader, self.plain = 0, False
        self.layouts: dict[tuple[str, int, Codec], Layout] = {}
        self.observe: Callable[[int], EncodeObserver | None] = lambda part: clock.observer

    def follow(self, plan: ActsPlan | None) -> None:
        """Take the plan of another phase."""
        assert plan is not None
        self.plan = plan

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """While it is open, activations travel uncompressed and the ledger counts nothing."""
        before, self.plain = self.plain, True
        try:
            yield
        finally:
            self.plain = before

    def layout(self, wire: Wire, place: str, numel: int, dtype: torch.dtype) -> Layout:
        codec = RawCodec(dtype) if self.plain else self.plan.recipe.acts_codec(wire)
        key = place, numel, codec
        if key not in self.layouts:
            self.layouts[key] = acts_layout(*key)
        return self.layouts[key]

    def encode(
        self, layout: Layout, x: Tensor, wire: Wire, part: int, rows: tuple[int, ...], room: Tensor
    ) -> None:
        noise = None
        if layout.stochastic:
            noise = self.clock.rows_noise(wire, self.reader * self.tp + part, rows)
        observer = None if self.plain else self.observe(part)
        errors = observer.room(wire, layout, room) if observer is not None else None
        kernels.encode(layout, [x.detach()], noise, room, errors)
        if observer is not None:
            observer.encoded(wire, layout, errors)


class Parts(ActsEncoder):
    """The exchanges between the tensor parts that read one batch. Lists have a tensor for each
    part, in order; with a `transport` between processes they have one, of this process's part."""

    plan: PartsPlan

    def __init__(
        self, plan: PartsPlan, clock: Clock, ledger: Ledger, transport: Collectives | None = None
    ) -> None:
        super().__init__(plan, clock, ledger)
        self.transport = transport
        self.own = range(plan.tp) if transport is None else (transport.rank,)

    def gather(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        """Gather slices [n, dim] of tokens: all tokens [tp · n, dim], for each of these parts."""
        tp, layout = self.tp, self.layout(wire, place, xs[0].numel(), xs[0].dtype)
        outs = [x.new_empty(tp * x.shape[0], *x.shape[1:]) for x in xs]
        held, leg = self._held(layout, xs[0], 1), None
        if held is None:
            payload = xs[0].new_empty(tp, layout.nbytes, dtype=torch.uint8)
        else:
            payload = outs[0].view(tp, -1).view(torch.uint8)
        if self.transport is not None:
            what = f"{wire} of {place} (tensor parts)"
            leg = self.transport.gathering(payload, "world", what, held)
        if held is None:
            for part, x in zip(self.own, xs, strict=True):
                room = payload[part : part + 1] if leg is None else leg.room
                self.encode(layout, x, wire, part, (part,), room)
        self._count(wire, leg.send() if leg else None, layout.nbytes)
        if held is None:
            kernels.decode(layout, payload, outs[:1])
        for out in outs[1:]:
            out.copy_(outs[0])
        return outs

    def scatter(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        """Sum terms [tp · n, dim] over all parts: a slice [n, dim] for each of these."""
        tp, rows = self.tp, xs[0].shape[0] // self.tp
        # slices travel on the same wire at the same place: terms have noise and errors of their own
        layout = self.layout(wire, f"{place}.sum", xs[0].numel() // tp, xs[0].dtype)
        payloads = xs[0].new_empty(tp, len(self.own), layout.nbytes, dtype=torch.uint8)
        held, leg = self._held(layout, xs[0], tp), None
        if self.transport is not None:
            what = f"{wire} of {place} (tensor parts)"
            leg = self.transport.exchanging(payloads, "world", what, held)
        if held is None:
            for part, x in zip(self.own, xs, strict=True):
                room = payloads[part] if leg is None else leg.room
                self.encode(layout, x, wire, part, tuple(range(tp)), room)
        self._count(wire, leg.send() if leg else None, layout.nbytes)
        outs = []
        for i, x in enumerate(xs):
            out = x.new_empty(1, rows * x[0].numel())
            kernels.reduce(layout, payloads[:, i : i + 1].contiguous(), out)
            outs.append(out.view(rows, *x.shape[1:]))
        return outs

    def _held(self, layout: Layout, x: Tensor, rows: int) -> Tensor | None:
        """Return `x` as its payload uint8 [rows, nbytes], where that has the same bytes and nobody
        looks: then nothing is copied before it travels."""
        codec = layout.segments[0].codec
        if self.transport is None or (not self.plain and self.observe(self.own[0])):
            return None
        same = isinstance(codec, RawCodec) and codec.dtype == x.dtype
        if not same or layout.nbytes * rows != x.nbytes:
            return None
        return x.detach().view(rows, -1).view(torch.uint8)

    def raw(self, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        """Gather values uncompressed: those of all parts [tp, *], for each of these."""
        if self.transport is None:
            self._count(TP_RAW, None, xs[0].nbytes)
            return [torch.stack(list(xs)) for _ in xs]
        (own,) = xs
        payload = own.new_empty(self.tp, own.nbytes, dtype=torch.uint8)
        leg = self.transport.gathering(payload, "world", f"{TP_RAW} of {place} (tensor parts)")
        leg.room.copy_(own.contiguous().view(-1).view(torch.uint8))
        self._count(TP_RAW, leg.send(), own.nbytes)
        return [payload.view(own.dtype).view(self.tp, *own.shape)]

    def sum(self, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        """Sum fp32 values over all parts in their order, from +0, for each of these parts."""
        return [self.total(every) for every in self.raw(place, xs)]

    @staticmethod
    def total(every: Iterable[Tensor]) -> Tensor:
        """Sum fp32 tensors in their order, from +0."""
        own = iter(every)
        first = next(own)
        total = torch.zeros_like(first).add_(first)
        for one in own:
            total += one
        return total

    def _count(self, wire: Wire, sent: Traffic | None, each: int) -> None:
        if not self.plain:
            every = Traffic(self.tp * (self.tp - 1) * each, 0)
            self.ledger.add(wire, every if sent is None else sent)
