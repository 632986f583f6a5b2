"""Gradients from their reduction to their update, and training state in host memory
(engine.place): gradients leave as they land, and each unit is updated just before its next forward
gathers it.

Nothing here changes a bit. Squares of gradients are summed at the end of the passes, in the graph
of a captured step, and of those that leave when they do. The norm adds the sums in the plan's
order, so it is known before any weight changes, and gradients that have left need not come back.

The update has a stream of its own, on which a unit's planes come in, are updated and leave again
(`CompactAdamW`) while the units before it compute. A unit's come in while those before it leave:
FSDP2's gathers wait for its new weights alone, and so does the computing stream, which lets go of
the gradients only then. Units that a step does not run are updated after its first forward. So no
backward overwrites a gradient that is still to be used.

`ByUnit` updates a unit as soon as it has been reduced (train.clip_by=unit).

`Masters` are fp32 shards, or (train.masters=split) their high planes. FSDP2 shards, gathers and
gives gradients to these, in bf16. The low planes lie next to them, sharded alike. No fp32 master
and no fp32 gradient exists then (`codecs/planes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs.numerics import clip_factor, total_norm
from zpp_lab.codecs.planes import joined, split
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.transport import all_gather
from zpp_lab.engines.fsdp.base import own_rows
from zpp_lab.engines.fsdp.comm import param_groups
from zpp_lab.engines.norm import SquareSums, in_order
from zpp_lab.engines.optim import host
from zpp_lab.engines.optim.build import AdamW, begin, set_rate
from zpp_lab.engines.optim.shards import local, sharded_as

# updates the parameters of these names; returns what it reads, and events after which weights are
# new, besides what the current stream does
Update = Callable[[Iterable[str]], tuple[object, list[Any]]]


class Resident:
    """Of one rank. `far`: names of parameters whose gradients lie in host memory. `waits`: whether
    updates wait for the next forward. `late`: names of parameters whose gradients change after the
    passes."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        clock: Clock,
        device: torch.device,
        far: Collection[str],
        waits: bool,
        late: Container[str],
    ) -> None:
        self.parameters, self.clock, self.device, self.late = parameters, clock, device, late
        self.rooms: dict[str, Tensor] = {}  # where gradients go
        self.there: dict[str, Tensor] = {}  # gradients of this step, in their rooms
        trained = {n for n, p in parameters.items() if p.requires_grad}
        self.sums = SquareSums(plan, trained, device)
        self.pending: Update | None = None
        self.units = {u.unit.name: [p.name for p in u.unit.parameters] for u in plan.units}
        # by unit, until the computing stream waits for its weights: their events, and what the
        # update reads
        self.under_way: dict[str, tuple[list[Any], object]] = {}
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu and waits else None
        self.ready: Any = None  # the event after which gradients and norm are there
        for name in trained.intersection(far):
            parameters[name].register_post_accumulate_grad_hook(partial(self._take, name))
        for unit, module in modules.items() if waits else ():
            for group in param_groups(module):
                group.unshard = partial(self._unshard, unit, group, group.unshard)
                group.wait_for_unshard = partial(self._wait, unit, group.wait_for_unshard)

    # ------------------------------------------------------------------ gradients

    def start(self) -> None:
        """A step's passes begin: what an earlier one left is given up."""
        self.there = {}
        self.sums.start()

    def end(self) -> frozenset[str]:
        """All reductions of a step are complete; returns whose squares are summed."""
        self.sums.take({n: g for n, g in self._near().items() if n not in self.late})
        return self.sums.known

    @torch.no_grad()
    def _take(self, name: str, p: nn.Parameter) -> None:
        """A reduction has left a gradient: send it to host memory. Runs on its stream."""
        assert p.grad is not None
        own, p.grad = local(p.grad), None
        if own.is_cuda:
            own.record_stream(torch.cuda.current_stream(self.device))
        if name not in self.rooms:
            self.rooms[name] = host.zeros(own.shape, own.dtype, own.device, True)
        room = self.rooms[name]
        if name in self.there:  # as FSDP2 adds up micro-steps
            own = room.to(self.device, non_blocking=True, copy=True).add_(own)
        if self.clock.last and name not in self.late:
            self.sums.take({name: own})
        room.copy_(own, non_blocking=True)
        self.there[name] = room
        host.vacate(own)

    def grads(self) -> dict[str, Tensor]:
        """Return this rank's shards of the mean gradient by name, without padding, wherever they
        lie."""
        every = self._near() | self.there
        return {n: every[n] for n in self.parameters if n in every}

    def _near(self) -> dict[str, Tensor]:
        return {n: local(p.grad) for n, p in self.parameters.items() if p.grad is not None}

    def squares(self, grads: Mapping[str, Tensor], known: Set[str]) -> Tensor:
        """Return the sum of their squares, fp64, as `norm.squares` adds it up. known: what `end`
        has returned."""
        late = {n: g for n, g in grads.items() if n not in known}
        for name in [n for n in late if n in self.there]:  # not in the last micro-step
            self.sums.take({name: late.pop(name).to(self.device)})
        self.sums.take(late)
        return self.sums.total()

    # ------------------------------------------------------------------ updates

    def defer(self, update: Update) -> None:
        """Update each unit before its next forward."""
        assert self.pending is None
        self.pending = update
        if self.stream is not None:
            self.ready = torch.cuda.current_stream(self.device).record_event()

    def drop(self) -> None:
        """Give up an update that changes nothing, as its norm is not finite."""
        self.pending = None

    def settle(self) -> None:
        """Update what waits; the current stream continues once weights are new. Planes may still be
        leaving."""
        if self.pending is not None:
            for unit in (*list(self.units)[-1:], *list(self.units)[:-1]):
                self._update(unit)
            self.pending = None
        for unit in [*self.under_way]:
            self._arrived(unit)

    def _unshard(
        self, unit: str, group: Any, unshard: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if self.pending is not None:
            self._update(unit)
            for new in self.under_way[unit][0]:
                group._wait_all_gather_streams_on_event(new)
        unshard(*args, **kwargs)

    def _wait(self, unit: str, wait_for_unshard: Callable[[], None]) -> None:
        self._arrived(unit)  # on one rank FSDP2 copies shards on the current stream
        wait_for_unshard()

    def _update(self, unit: str) -> None:
        """Start a unit's update, if it has still to come."""
        assert self.pending is not None
        if unit in self.under_way:
            return
        if self.stream is None:
            read, _ = self.pending(self.units[unit])
            self.under_way[unit] = [], read
            return
        self.stream.wait_event(self.ready)
        with torch.cuda.stream(self.stream):
            read, news = self.pending(self.units[unit])
            self.under_way[unit] = [*news, self.stream.record_event()], read

    def _arrived(self, unit: str) -> None:
        """Let the current stream wait for a unit's weights, and let go of what has been read."""
        news, _ = self.under_way.pop(unit, ([], None))
        for new in news:
            torch.cuda.current_stream(self.device).wait_event(new)


# ---------------------------------------------------------------------- unit by unit


class ByUnit(Resident):
    """train.clip_by=unit: each unit's gradient is clipped by its own norm, and the unit is updated,
    as soon as it has been reduced. No gradient is stored: a step needs room for those of two units.

    Another rule than the norm of the whole gradient, exact by its own definition. Ranks exchange a
    number a unit within the backward, in the order in which units are reduced, which is the same on
    all of them. A unit whose norm is not finite keeps its weights, but those that were reduced
    before it have changed: the step is lost, and a run resumes from its last checkpoint.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        clock: Clock,
        device: torch.device,
        optimizer: AdamW,
        clip: float,
        watched: Callable[[str, torch.device], AbstractContextManager[None]],
    ) -> None:
        """`watched`: within it ranks may be waited for."""
        super().__init__(modules, parameters, plan, clock, device, parameters, False, frozenset())
        self.shards, self.world = plan.recipe.shards, plan.recipe.cluster.world
        self.optimizer, self.clip, self.watched = optimizer, clip, watched
        self.unit_of = {name: unit for unit, names in self.units.items() for name in names}
        self.step, self.now = 0, ""  # the unit whose gradients land
        self.landed: dict[str, Tensor] = {}  # its gradients
        self.norms: dict[str, Tensor] = {}  # of this step's units

    def enter(self, step: int, lr: float) -> None:
        """Step `step` begins, at this learning rate."""
        self.step = step
        set_rate(self.optimizer, lr)

    def start(self) -> None:
        super().start()
        self.landed, self.norms = {}, {}

    @torch.no_grad()
    def _take(self, name: str, p: nn.Parameter) -> None:
        """A reduction has left a gradient; the unit before it is complete. Runs on its stream."""
        assert p.grad is not None
        own, p.grad = local(p.grad), None
        if own.is_cuda:
            own.record_stream(torch.cuda.current_stream(self.device))
        if self.unit_of[name] != self.now:
            self._finish()
            self.now = self.unit_of[name]
        self.landed[name] = own

    def end(self) -> frozenset[str]:
        self._finish()
        return self.sums.known

    @torch.no_grad()
    def _finish(self) -> None:
        """The gradients that have landed are a unit's: clip and update it."""
        own, self.landed = self.landed, {}
        if not own:
            return
        assert self.now not in self.norms, "a unit is reduced once a step"
        self.sums.take(own)
        sums = in_order(self.sums.of(own)[:, None])
        every = torch.empty(self.world, dtype=sums.dtype, device=self.device)
        with self.watched("a unit's gradient norm (world)", self.device):
            all_gather(every, sums)
        norm = total_norm(every[: self.shards])
        if self.shards < self.world:  # others have the same, unless one is not finite
            norm = norm + 0 * every[self.shards :].sum()
        self.norms[self.now] = norm
        factor, ok = clip_factor(norm, self.clip), torch.isfinite(norm)
        change = begin(self.optimizer, ok, self.step, factor)
        change({self.parameters[name]: grad for name, grad in own.items()})
        for grad in own.values():
            host.vacate(grad)

    def grads(self) -> dict[str, Tensor]:
        """Return an empty tensor for each parameter that had a gradient: none is there now."""
        return {n: torch.empty(0) for n in self.parameters if n in self.sums.known}


# ---------------------------------------------------------------------- masters


class Masters:
    """Made before FSDP2 takes the model; complete once `keep` was called. low: the low planes by
    name, DTensors; {} where masters are fp32."""

    def __init__(
        self,
        model: nn.Module,
        skip: Set[str],
        cut: bool,
        shards: int,
        part: int,
        far: Collection[str] = (),
    ) -> None:
        """`cut`: whether parameters, but those in `skip`, become high planes. `part`: which of the
        shards is this rank's. `far`: whose low planes lie in host memory."""
        self.cut, self.shards, self.part, self.far = cut, shards, part, far
        self.low: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}  # low planes of a model that is whole already
        for name, p in model.named_parameters():
            if not cut or name in skip:
                continue
            if p.is_meta:
                p.data = p.data.to(torch.bfloat16)
            else:
                p.data, self.whole[name] = split(p.detach())

    def put(self, name: str, p: Tensor, values: Tensor) -> None:
        """Set this rank's rows of a parameter to fp32 values."""
        own = local(p.detach())
        if not self.cut:
            own.copy_(values)
            return
        high, low = split(values.to(own.device, torch.float32))
        own.copy_(high)
        local(self._low(name, p)).copy_(low)

    def keep(self, parameters: Mapping[str, Tensor]) -> None:
        """Have the low planes of all parameters: those of a whole model's values, or as `put`, or
        zeros."""
        for name, p in parameters.items() if self.cut else ():
            own = local(self._low(name, p))
            if name in self.whole:
                rows = slice(*own_rows(tuple(p.shape), self.shards, self.part))
                own.copy_(self.whole[name][rows])
        self.whole = {}

    def _low(self, name: str, p: Tensor) -> Tensor:
        if name not in self.low:
            high = local(p.detach())
            own = host.zeros(high.shape, torch.int16, high.device, name in self.far)
            self.low[name] = sharded_as(p, own, p.shape)
        return self.low[name]


def master(p: Tensor, low: Tensor | None) -> Tensor:
    """Return this rank's rows of a master, fp32: the parameter's own, or new ones of two planes."""
    own = local(p.detach())
    return own if low is None else joined(own, local(low).to(own.device))
