"""Gradients from their reduction to their update, and training state in host memory
(engine.place): gradients leave as they land, and each unit is updated just before its next forward
gathers it.

Nothing here changes a bit. Squares of gradients are summed at the end of the passes, in the graph
of a captured step, and of those that leave when they do. The norm adds the sums in the plan's
order, so it is known before any weight changes, and gradients that have left need not come back.

The update has a stream of its own, on which a unit's planes come in, are updated and leave again
(`CompactAdamW`) while the units before it compute. With each unit the next one begins of which
something passes the bus, so that the bus is never idle before the last one has passed. A unit's
planes come in while those before it leave:
FSDP2's gathers wait for its new weights alone, and so does the computing stream, which lets go of
the gradients only then. Units that a step does not run are updated after its first forward. So no
backward overwrites a gradient that is still to be used.

`ByUnit` updates a unit as soon as it has been reduced (train.clip_by=unit).

`Masters` are fp32 shards, or (train.masters=split) their high planes. FSDP2 shards, gathers and
gives gradients to these, in bf16. The low planes lie next to them, sharded alike. No fp32 master
and no fp32 gradient exists then (`codecs/planes.py`).

High planes in host memory (`Brought`) come before each gather that reads them. Where the unit is
updated before, the gather reads what the update has left on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs.numerics import clip_factor, total_norm
from zpp_lab.codecs.planes import joined, split
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.transport import all_gather
from zpp_lab.engines.fsdp.base import move_out, own_rows
from zpp_lab.engines.fsdp.comm import managed, param_groups
from zpp_lab.engines.norm import SquareSums, in_order
from zpp_lab.engines.optim import CompactAdamW, host
from zpp_lab.engines.optim.build import AdamW, begin, set_rate
from zpp_lab.engines.optim.shards import local, sharded_as

# updates the parameters of these names; returns what it reads, and events after which weights are
# new, besides what the current stream does
Update = Callable[[Iterable[str]], tuple[object, list[Any]]]


def updates(
    optimizer: AdamW,
    parameters: Mapping[str, nn.Parameter],
    step: int,
    factor: Tensor | None,
    ok: Tensor,
    grads: Mapping[str, Tensor],
    whole: bool,
) -> Update:
    """Take all gradients; returns what updates the parameters of given names that have one, each
    once: clipped by `factor`, and unchanged where `ok` is false on the device. `whole`: update all
    of them now, as their states come from host memory while others go back."""
    found = dict(grads)
    optimizer.zero_grad(set_to_none=True)
    every = () if whole else [parameters[name] for name in found]
    change = begin(optimizer, ok, step, factor, whole, every)

    def update(names: Iterable[str]) -> tuple[object, list[Any]]:
        taken = [name for name in names if name in found]
        own: dict[Tensor, Tensor] = {parameters[n]: found.pop(n) for n in taken}
        ends = change(own)
        return own, ends or []

    if whole:
        update(parameters)
    return update


class Resident:
    """Of one rank. `far`: names of parameters whose gradients lie in host memory. `waits`: whether
    updates wait for the next forward. `late`: names of parameters whose gradients change after the
    passes. `brought`: weights that come from host memory. `passing`: names of parameters of which
    something passes the bus to be updated."""

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
        brought: Brought | None = None,
        passing: Collection[str] = (),
    ) -> None:
        self.brought = brought
        self.parameters, self.clock, self.device, self.late = parameters, clock, device, late
        self.rooms: dict[str, Tensor] = {}  # where gradients go
        self.there: dict[str, Tensor] = {}  # gradients of this step, in their rooms
        trained = {n for n, p in parameters.items() if p.requires_grad}
        self.sums = SquareSums(plan, trained, device)
        self.pending: Update | None = None
        self.updated: set[str] = set()  # units, of those that it updates
        self.units = {u.unit.name: [p.name for p in u.unit.parameters] for u in plan.units}
        # weights that come for a gather would lie about until then
        far_off = brought.high.keys() if brought is not None else set[str]()
        some = {u: set(passing).intersection(names) for u, names in self.units.items()}
        self.passing = [u for u in some if some[u] and far_off.isdisjoint(self.units[u])]
        # by unit, until the computing stream waits for its weights: their events, and what the
        # update reads
        self.under_way: dict[str, tuple[list[Any], object]] = {}
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu and (waits or brought) else None
        self.ready: Any = None  # the event after which gradients and norm are there
        for name in trained.intersection(far):
            parameters[name].register_post_accumulate_grad_hook(partial(self._take, name))
        for unit, module in modules.items() if waits or brought else ():
            for group in param_groups(module):
                group.unshard = partial(self._unshard, unit, group, group.unshard)
                group.wait_for_unshard = partial(self._wait, unit, group, group.wait_for_unshard)

    # ------------------------------------------------------------------ gradients

    def start(self) -> None:
        """A step's passes begin: what an earlier one left is given up."""
        self.there = {}
        self.sums.start()
        self.forget()

    def forget(self) -> None:
        """Give up weights that came for gathers in vain. No gather is under way."""
        if self.brought is None:
            return
        for unit in [*self.brought.there]:
            self._arrived(unit)
            self.brought.leave(unit)

    def end(self) -> frozenset[str]:
        """All reductions of a step are complete; returns whose squares are summed."""
        self.sums.take({n: g for n, g in self._near().items() if n not in self.late})
        return self.sums.known

    @torch.no_grad()
    def _take(self, name: str, p: nn.Parameter) -> None:
        """A reduction has left a gradient: send it to host memory. Runs on its stream."""
        assert p.grad is not None
        own, p.grad = local(p.grad), None
        self._send(name, own)

    def _send(self, name: str, own: Tensor) -> None:
        """Add a gradient to what lies in host memory, on the current stream."""
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
        self.pending, self.updated = update, set()
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
                self._update(unit, gathers=False)
            self.pending = None
        for unit in [*self.under_way]:
            self._arrived(unit)

    def _unshard(
        self, unit: str, group: Any, unshard: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if self.pending is not None:
            self._update(unit)
            for other in [u for u in self.passing if u not in self.updated][:1]:
                self._update(other)
        if self.brought is not None and group.is_sharded:
            with self._beside():
                came = self.brought.bring(unit)
            news, read = self.under_way.get(unit, ([], None))
            self.under_way[unit] = [*news, *came], read
        for new in self.under_way.get(unit, ([], None))[0]:
            group._wait_all_gather_streams_on_event(new)
            if group._training_state.name == "IDLE":  # then FSDP2 gathers on the current stream
                torch.cuda.current_stream(self.device).wait_event(new)
        unshard(*args, **kwargs)

    def _wait(self, unit: str, group: Any, wait_for_unshard: Callable[[], None]) -> None:
        self._arrived(unit)  # on one rank FSDP2 copies shards on the current stream
        wait_for_unshard()
        if self.brought is not None and not group.is_sharded:
            self.brought.leave(unit)

    def _beside(self) -> AbstractContextManager[None]:
        """Run on the stream of updates, if there is one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _update(self, unit: str, gathers: bool = True) -> None:
        """Start a unit's update, if it has still to come. `gathers`: a gather follows."""
        assert self.pending is not None
        if unit in self.updated:
            return
        self.updated.add(unit)
        if self.stream is not None:
            self.stream.wait_event(self.ready)
        with self._beside():
            read, news = self.pending(self.units[unit])
            if self.stream is not None:
                news = [*news, self.stream.record_event()]
        self.under_way[unit] = news, read
        if self.brought is not None:
            self.brought.take(unit, gathers)

    def _arrived(self, unit: str) -> None:
        """Let the current stream wait for a unit's weights, and let go of what has been read."""
        news, _ = self.under_way.pop(unit, ([], None))
        for new in news:
            torch.cuda.current_stream(self.device).wait_event(new)


class Brought:
    """High planes that host memory has, on the device from their transfer, or their update, until a
    gather has read them. They come in the streams of updates (`host.Streams`), which let them wait
    for those that have not left yet."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        high: Mapping[str, Tensor],
        optimizer: CompactAdamW,
        reads: Mapping[str, Callable[[], bool]],
    ) -> None:
        """`high`: by parameter, padded. `reads`: whether a unit's gather that begins now reads
        them, where not all do."""
        self.parameters, self.high, self.optimizer, self.reads = parameters, high, optimizer, reads
        assert optimizer.streams is not None
        self.streams, self.device = optimizer.streams, optimizer.device
        names = {id(parameters[name]): name for name in high}
        self.own = {unit: _named(module, names) for unit, module in modules.items()}
        self.there: dict[str, dict[str, Tensor]] = {}  # by unit and parameter, on the device

    def bring(self, unit: str) -> list[Any]:
        """Have a unit's on the device, where FSDP2 finds them; returns the events after which they
        are there, besides those of an update."""
        own, came = self.own[unit], list[Any]()
        if not own or not self.reads.get(unit, lambda: True)():
            return []
        near = self.there.setdefault(unit, {})
        missing = [name for name in own if name not in near]
        if missing:
            items = [self.parameters[name] for name in missing]
            self.streams.follow(items)
            with self.streams.next(items):
                for name in missing:
                    near[name] = self.high[name].to(self.device, non_blocking=True, copy=True)
                came = self.streams.mark()
        for name, p in own.items():
            p._sharded_param_data = near[name].view(-1)
        return came

    def take(self, unit: str, gathers: bool) -> None:
        """Keep what an update of a unit has left on the device, if a gather follows."""
        fresh, self.optimizer.fresh = self.optimizer.fresh, {}
        new = {n: fresh[p] for n in self.own[unit] if (p := self.parameters[n]) in fresh}
        if gathers and new:
            self.there.setdefault(unit, {}).update(new)
            return
        for tensor in new.values():
            host.vacate(tensor)

    def leave(self, unit: str) -> None:
        """A gather has read a unit's, and the current stream waits for it."""
        near = self.there.pop(unit, {})
        for name, p in self.own[unit].items():
            p._sharded_param_data = self.high[name].view(-1)
        self.streams.let_go([*near.values()])


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
        brought: Brought | None,
        optimizer: AdamW,
        clip: float,
        watched: Callable[[str, torch.device], AbstractContextManager[None]],
    ) -> None:
        """`watched`: within it ranks may be waited for."""
        where = modules, parameters, plan, clock, device
        super().__init__(*where, parameters, False, frozenset(), brought)
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
    name, DTensors; {} where masters are fp32. high: the high ones that lie in host memory, with
    their shards' padding."""

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
        self.high: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}  # low planes of a model that is whole already
        for name, p in model.named_parameters():
            if not cut or name in skip:
                continue
            if p.is_meta:
                p.data = p.data.to(torch.bfloat16)
            else:
                p.data, self.whole[name] = split(p.detach().float())

    def move_out(
        self, modules: Iterable[nn.Module], names: Mapping[int, str], device: torch.device
    ) -> None:
        """Let host memory have high planes of wrapped modules. names: of these, by their ids."""
        for module in modules:
            self.high |= {n: move_out(p, device) for n, p in _named(module, names).items()}

    def put(self, name: str, p: Tensor, values: Tensor) -> None:
        """Set this rank's rows of a parameter to fp32 values."""
        own = local(p).detach()
        if not self.cut:
            own.copy_(values)
            return
        high, low = split(values.to(p.device, torch.float32))
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
            own = host.zeros(local(p).shape, torch.int16, p.device, name in self.far)
            self.low[name] = sharded_as(p, own, p.shape)
        return self.low[name]


def _named(module: nn.Module, names: Mapping[int, str]) -> dict[str, Any]:
    """Return FSDP2's objects of a wrapped module's parameters that have a name, by the id."""
    every = [(id(p.sharded_param), p) for p in managed(module)]
    return {names[which]: p for which, p in every if which in names}


def master(p: Tensor, low: Tensor | None) -> Tensor:
    """Return this rank's rows of a master, fp32: the parameter's own, or new ones of two planes."""
    own = local(p).detach().to(p.device, non_blocking=True)
    return own if low is None else joined(own, local(low).to(p.device, non_blocking=True))
