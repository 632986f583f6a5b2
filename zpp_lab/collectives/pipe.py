"""What stages of a model send each other: closed forms of bytes, and the two ends of a crossing.

A crossing lies between two blocks. Its sending end encodes a micro-batch's activations, a slice for
each tensor part, and gives the payload as fp32, so that any scheduler can send it; the receiving
end decodes. Backward runs the other way: the receiving end encodes the gradient of what it decoded,
the sending end decodes it. A payload is bytes: nothing may add it to another.

Where D ranks of each stage read batches, tp of them read the same one and a slice takes r bytes, a
micro-batch sends r tp D bytes over a crossing in each direction. Between nodes, if stages are whole
nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zpp_lab.codecs import kernels
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.acts import ActsEncoder, acts_layout, coded
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.traffic import Leg, Traffic
from zpp_lab.config.wires import ACTS_PIPE

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class PipePlan:
    """What a step sends between `stages` stages, `chunks` of them on a rank, so that stage s is on
    the ranks of place s modulo their number. numel: of a micro-batch's activations, a slice."""

    recipe: Recipe
    tp: int
    stages: int
    chunks: int
    numel: int
    micro_steps: int
    across: bool  # stages are whole nodes
    bits_only: bool = False  # only what codecs make smaller

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.stages // self.chunks

    @property
    def layout(self) -> Layout:
        return acts_layout("", self.numel, self.recipe.acts_codec(ACTS_PIPE))

    def traffic(self, each: int) -> Traffic:
        """Return what a rank sends over a crossing."""
        return Traffic(0, each) if self.across else Traffic(each, 0)

    def legs(self) -> list[Leg]:
        """Return what a step sends over all crossings, both ways."""
        layout, readers = self.layout, self.tp * self.recipe.cluster.world
        times = 2 * (self.stages - 1) * self.micro_steps
        legs = [Leg(ACTS_PIPE, layout, self.traffic(layout.nbytes) * readers, times)]
        return coded(legs) if self.bits_only else legs

    def own(self, place: int) -> Traffic:
        """Return what a step sends from one rank of this place in its pipeline."""
        mine = range(place, self.stages, self.ranks)
        times = sum((s > 0) + (s < self.stages - 1) for s in mine) * self.micro_steps
        return self.traffic(self.layout.nbytes) * times


class Pipe(ActsEncoder):
    """The ends of crossings. Lists have a tensor for each tensor part of this process, `own`, in
    order. `stage`: the one that computes, where the process has several."""

    plan: PipePlan

    def __init__(self, plan: PipePlan, clock: Clock, ledger: Ledger, own: Sequence[int]) -> None:
        super().__init__(plan, clock, ledger)
        self.own, self.stage = own, 0

    def out(self, place: str, stage: int, xs: Sequence[Tensor]) -> list[Tensor]:
        """Encode what `stage` gives the next one, as fp32 [bytes / 4]."""
        return list(_Out.apply(self, place, stage, *xs))

    def into(
        self,
        place: str,
        stage: int,
        payloads: Sequence[Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Decode what `stage` gets from the one before it."""
        return list(_Into.apply(self, place, stage, tuple(shape), dtype, *payloads))

    def send(self, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        """Encode a payload for each of these parts, and count it."""
        layout, made = self.layout(ACTS_PIPE, place, xs[0].numel(), xs[0].dtype), []
        for part, x in zip(self.own, xs, strict=True):
            room = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=x.device)
            self.encode(layout, x.contiguous(), ACTS_PIPE, part, (0,), room)
            if not self.plain:
                self.ledger.add(ACTS_PIPE, self.plan.traffic(layout.nbytes))
            made.append(room.view(torch.float32)[0])
        return made

    def receive(
        self, place: str, payloads: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]:
        """Decode the payloads for these parts."""
        outs = [torch.empty(*shape, dtype=dtype, device=p.device) for p in payloads]
        for payload, out in zip(payloads, outs, strict=True):
            layout = self.layout(ACTS_PIPE, place, out.numel(), dtype)
            kernels.decode(layout, payload.contiguous().view(torch.uint8)[None], [out])
        return outs

    def crossing(self, after: dict[int, int]) -> Callable[[int, Sequence[Tensor]], list[Tensor]]:
        """Return what a whole model calls after each block: both ends of the crossing where stage
        `after[block]` ends with the block, else nothing."""

        def cross(block: int, xs: Sequence[Tensor]) -> list[Tensor]:
            stage = after.get(block)
            if stage is None or self.plain:
                return list(xs)
            payloads = self.out(name_of(stage), stage, xs)
            return self.into(name_of(stage), stage + 1, payloads, xs[0].shape, xs[0].dtype)

        return cross


def passes(stages: int, stage: int, micros: int, tick: int) -> list[tuple[Pass, int]]:
    """Return a stage's passes in a tick of schedule=1f1b_overlap, in order, with their micro-steps.

    What a tick computes is sent while the next one computes, and used in the one after: a stage is
    two ticks behind the one before it. The backward goes first, which frees its activations, but
    in the last stage it is the same micro-step's.
    """
    back = tick - 4 * (stages - 1) + 2 * stage
    due: list[tuple[Pass, int]] = [("backward", back), ("forward", tick - 2 * stage)]
    if stage == stages - 1:
        due.reverse()
    return [(which, micro) for which, micro in due if 0 <= micro < micros]


def name_of(stage: int) -> str:
    """Name the crossing behind a stage."""
    return f"stages.{stage}"


def _back(place: str) -> str:
    return f"{place}.gradient"


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pipe: Pipe, place: str, stage: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.of, ctx.kind = (pipe, place, stage), (xs[0].shape, xs[0].dtype)
        pipe.stage = stage
        return tuple(pipe.send(place, xs))

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *payloads: Tensor) -> tuple[Any, ...]:
        pipe, place, pipe.stage = ctx.of
        return None, None, None, *pipe.receive(_back(place), payloads, *ctx.kind)


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pipe: Pipe,
        place: str,
        stage: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *payloads: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.of = pipe, place, stage
        pipe.stage = stage
        return tuple(pipe.receive(place, payloads, shape, dtype))

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        pipe, place, pipe.stage = ctx.of
        return None, None, None, None, None, *pipe.send(_back(place), grads)
