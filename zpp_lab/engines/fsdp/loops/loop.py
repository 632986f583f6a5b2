"""Follow the steps of a user training loop by its forwards, backwards and optimizers.

A step begins with the first forward with gradients after the last step's end; the first one after a
backward begins a further micro-step. It ends when an optimizer has updated one of the model's
parameters, which a hook on all of torch's optimizers sees. What follows from its end is done once
it is needed: before the next forward, or when the state is asked for; by then every optimizer has
had its turn. Where reduced gradients are gone before an optimizer took them, the loop has dropped
the step (a GradScaler does): the next step begins and memories stay.

Anybody may change the masters: by a copy, through `.data`, with an optimizer of their own. torch's
version counters do not show that, so the masters' bits are added up (`engines/frozen.py`) when an
optimizer has stepped and when nodes have got them, and compared before later forwards. A change
after a backward ends its step. Another one makes a forward without gradients (of averaged weights
that were swapped in) gather the masters uncompressed, while replicated weights stay; a forward
with gradients replicates them again.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zpp_lab.codecs.numerics import total_norm
from zpp_lab.collectives.plan import no_bytes
from zpp_lab.collectives.reduce import Names
from zpp_lab.collectives.transport import Transport, all_gather
from zpp_lab.engines.frozen import Marks, differing, mark, mark_all
from zpp_lab.engines.fsdp.base import added, own_rows
from zpp_lab.engines.fsdp.comm import (
    check_ended,
    in_backward,
    managed,
    parameter_order,
    retrain,
)
from zpp_lab.engines.fsdp.gradients import on_forward
from zpp_lab.engines.fsdp.graph import StepGraph
from zpp_lab.engines.fsdp.kept import Kept, on_ranks
from zpp_lab.engines.fsdp.loops.hugging_face import refuse
from zpp_lab.engines.fsdp.loops.optimizer import USE, PlacedAdamW
from zpp_lab.engines.fsdp.loops.placed import Placing
from zpp_lab.engines.fsdp.rollout import rolled_bytes, rolling, rollout_traffic
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.norm import squares
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.parts import LoopParts
from zpp_lab.engines.rollout import STALE
from zpp_lab.engines.units import check_dtypes

OTHER = (
    "zpp_lab.shard with place, masters, optimizer_state or clip_by keeps state that other "
    f"optimizers do not know: {USE}"
)


class Loop:
    """Moves the clock of a wrapped model. `group`: of the ranks over which the model is cut, where
    the world has more. `parts`: where this rank has a tensor part of it."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: Wrapped,
        device: torch.device,
        transport: Transport,
        parts: LoopParts | None = None,
    ) -> None:
        self.model, self.wrapped, self.device, self.parts = model, wrapped, device, parts
        self.rank, self.group, self.watched = transport.rank, transport.group, transport.watched
        self.placing: Placing | None = None  # what `shard` was asked for
        self.placed: PlacedAdamW | None = None  # the optimizer that goes with it
        self.begun = False  # whether a step is under way
        self.norm_at_end: Tensor | None = None  # of a step that an optimizer has ended
        self.kept = Kept(wrapped.installed, {}, self.group)
        remembers = any(plan.memories for plan in wrapped.plans.values())
        self.follows_updates = remembers or bool(self.kept.updates)
        self.marked: Tensor | None = None  # the masters when they were last sent or updated
        self.there: Collection[str] = ()  # what nodes keep of a state that was loaded
        self.awaited: Marks = {}  # and of which masters
        self.taken: list[Names] = []  # of each reduction since the step began, in turn
        self.digest = hashlib.sha256()  # of these
        self.asked = -1  # the backward at whose end ranks compare these
        self.reduced: list[int] = []  # what backwards had left at the last forward with gradients
        self.outer: nn.Module | None = None  # the outermost module whose forward is under way
        self.arrived = False  # whether that forward has come to its first gather
        self.entered: set[nn.Module] = set()  # modules that have run
        self.graph: StepGraph | None = None  # of the function that the user has handed over
        self.inside = False  # whether that is under way
        self.said: set[str] = set()
        self.modules = [m for m in wrapped.by_name.values() if isinstance(m, nn.Module)]
        names = {id(p): n for n, p in model.named_parameters()}
        self.names = [n for module in self.modules for n in parameter_order(module, names)]
        self.dtypes = {n: p.dtype for n, p in self.parameters().items()}
        if parts is not None:
            parts.parameters = self.parameters
        for module in self.modules:
            on_forward(module, before=self._before, after=self._after)
        if parts is not None:
            parts.guard(wrapped.by_name, lambda: self.outer is not None)
        for unit in wrapped.installed:
            unit.inside[0].arrive = self._outside
        for reduce in wrapped.reduces:
            reduce.present.tell = self._reduces
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state = self.give_up  # type: ignore[assignment]
        _watch_optimizers()
        _LOOPS.add(self)  # the model holds us, the set does not

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of the gradients, fp64: sums in rank order, the same in every run."""
        grads = {n: local(p.grad) for n, p in self.parameters().items() if p.grad is not None}
        if self.parts is not None:
            grads = self.parts.counted(grads)
        return self.total(squares(grads, self.wrapped.plan, self.device))

    def total(self, own: Tensor) -> Tensor:
        """Return the norm of which each rank has its own squares' sum, fp64."""
        recipe, group, tp = self.wrapped.plan.recipe, self.group, 1
        if self.parts is not None:
            group, tp = None, self.parts.tp
        every = own.new_empty(recipe.cluster.world * tp)
        all_gather(every, own.view(1), group=group)
        return total_norm(every[: recipe.shards * tp])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the masters, also while whole weights are in their places; `to_empty` may have
        replaced them."""
        own = [p.sharded_param for module in self.modules for p in managed(module)]
        return dict(zip(self.names, own, strict=True))

    # ------------------------------------------------------------------ what the loop does

    def place(self, placing: Placing) -> None:
        """State lies where `placing` says: no optimizer but its own may step."""
        self.placing, self.kept.low = placing, placing.low
        placing.keep(self.parameters())

    def ended(self, norm: Tensor) -> None:
        """The optimizer of `placing` has taken a step's gradients, of this norm."""
        if self.begun:
            self.norm_at_end = norm

    def updated(self) -> None:
        """An optimizer, of torch or not, has stepped."""
        if not self.begun:
            return
        if (self.follows_updates or self.parts is not None) and in_backward():
            why = f"recipe {self.wrapped.plan.recipe.config.name}"
            raise RuntimeError(
                f"{why if self.parts is None else f'tp={self.parts.tp}'} needs optimizer steps "
                "after backward, but an optimizer stepped during it: step once all gradients are "
                "complete"
            )
        if not in_backward():  # where an optimizer may step without these
            check_ended(self.model)
        if self.norm_at_end is None:
            if self.placing is not None:
                raise ValueError(OTHER)
            self.norm_at_end = self.norm() if self.follows_updates else torch.zeros(())
        if self.kept.updates:
            self.marked = self.marks()
        self.arrived = False

    @torch.compiler.disable
    def _before(self, module: nn.Module, *_: Any) -> None:
        if in_backward() or self.wrapped.clock.rolling:
            return  # activation checkpointing computes a forward again; a rollout has all weights
        if not self.entered:
            refuse()
        if torch.is_inference_mode_enabled() and module not in self.entered:
            raise RuntimeError(
                f"{type(module).__name__} runs in torch.inference_mode() before it has run outside "
                "of it, so FSDP2 would keep tensors that cannot be trained: use torch.no_grad()"
            )
        self.entered.add(module)
        if self.outer is None or module in (self.outer, self.model):
            if self.graph is not None and not self.inside:
                self.graph.interrupt()
            check_ended(module)
            self.outer, self.arrived = module, False
            self.wrapped.clock.grad = torch.is_grad_enabled()
            self.arrive(self.wrapped.clock.grad)

    @torch.compiler.disable
    def _after(self, module: nn.Module, *_: Any) -> None:
        if in_backward() or self.wrapped.clock.rolling or module not in (self.outer, self.model):
            return
        self.outer, self.arrived = None, False
        self.wrapped.fallbacks.check(allowed=False)
        if self.placed is not None:
            self.placed.resident.settle()
        self.kept.wait()  # an optimizer may step next
        if not torch.is_grad_enabled():
            self.wrapped.reshard()  # an optimizer may step before the next forward
            self.wrapped.clock.master = False

    def _outside(self) -> None:
        """Look at the masters where a gather comes outside of any forward: by `model.unshard()`,
        after which a forward of either kind may follow."""
        if self.outer is None and not self.wrapped.clock.rolling:
            self.arrive(False)
            self.wrapped.clock.grad = True

    def give_up(self) -> None:
        """Give up a step that an exception has ended: FSDP2's `reset_iter_state`, which keeps
        gradients of gathered weights, and then the loop's part. ValueError where units are updated
        within backward."""
        if self.placing is not None and self.placing.residence.by_unit:
            raise ValueError(
                "clip_by='unit' has updated units before the exception: resume from a checkpoint"
            )
        wrapped = self.wrapped
        wrapped.under_way.join()
        FSDPModule.reset_iter_state(self.model)  # type: ignore[arg-type]
        for module in self.modules:
            for p in managed(module):
                p.sharded_param.grad = p.unsharded_accumulated_grad = None
                if hasattr(p, "unsharded_param"):  # it has run before
                    p.unsharded_param.grad = None
        for reduce in wrapped.reduces:
            reduce.present.seen.clear()
            reduce.landing.forget()
        for unit in wrapped.installed:
            unit.gather.release()
        if self.parts is not None:
            self.parts.running, self.parts.aside = -1, {}
        self.outer, self.asked, self.norm_at_end = None, -1, None
        self.begun = self.arrived = False

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Hold the weights whole, as the wire of rollouts brings them. RuntimeError on all ranks
        where the masters change meanwhile."""
        wrapped = self.wrapped
        if self.graph is not None:
            self.graph.interrupt()
        self.arrived = False
        self.arrive(False)
        marked, before = self.marks(), rollout_traffic(wrapped)
        master = wrapped.clock.master  # averaged weights that were swapped in travel uncompressed
        try:
            with torch.no_grad(), rolling(wrapped, whole=True, wire=True):
                yield
        finally:
            self.arrived = wrapped.clock.master = False
        if any(self.every(int(self.marks() != marked))):
            raise RuntimeError(STALE)
        wrapped.fallbacks.check(allowed=False)
        if not master:
            rolled_bytes(wrapped, None, before)

    def arrive(self, grad: bool) -> None:
        """Prepare the first gather of a forward; `grad`: with gradients."""
        if self.arrived:
            return
        self.arrived, clock = True, self.wrapped.clock
        clock.master = False
        filled = self.inside or self._look(grad)  # Graphed has looked, as a graph cannot
        if not filled and grad:
            raise ValueError(
                "the state that zpp_lab's Sharded.load_state_dict was given belongs to other "
                "weights than the model has: load the model's weights of the same checkpoint"
            )
        clock.master = not filled
        self.wrapped.enter(clock.step)
        if self.parts is not None:
            self.parts.enter(self.wrapped.phase)
            self.parts.plain = not grad  # as in evaluations of runs
        if grad:
            self.begin()

    def _look(self, grad: bool) -> bool:
        """End a step that has ended, and bring what nodes keep up to date with the masters;
        returns whether it is."""
        self.check_converted()
        kept = self.kept
        watched = self.marked is not None and not kept.stale
        if not grad and kept.updates and watched and self._changed():
            self._say("gathers the masters' own bytes in forwards without gradients")
            return False
        if grad and watched and self.norm_at_end is None and self._changed():
            if self.begun and self.taken:
                self.updated()
            elif kept.updates:
                kept.stale = True
                self._say("sends them to all nodes")
            self.wrapped.reshard()
        self.settle()
        if grad:
            self._follow_trained()
        return self._fill()

    def _fill(self) -> bool:
        """Let nodes take the masters where they keep nothing, or others; returns whether they keep
        these."""
        if self.kept.stale:
            if self.awaited and differing(self._whole_marks(self.awaited), self.awaited):
                return False
            kept, done = self._kept(), self.wrapped.clock.step
            if self.there:
                kept.loaded(self.there)
            else:  # as the last step would have sent it
                self.wrapped.enter(max(0, done - 1))
                kept.start(done)
            self.there, self.awaited, self.marked = (), {}, None
        # with `placing` no other optimizer steps, and marks would not let updates wait
        steps = (self.follows_updates or len(self.wrapped.plans) > 1) and self.placing is None
        if self.marked is None and (self.kept.updates or steps):
            self.marked = self.marks()
        return True

    def begin(self) -> None:
        """Begin a step, or after a backward a further micro-step."""
        clock, reduces, first = self.wrapped.clock, self.wrapped.reduces, not self.begun
        if self.placing is not None:
            if self.placed is None:
                raise ValueError(f"a forward with gradients before the optimizer was made: {USE}")
            self.placed.forward(first)
        if first:
            self.begun, clock.micro = True, 0
            self.taken, self.digest = [], hashlib.sha256()
            self.wrapped.memories.start(clock.step)
        reduced = [len(self.taken), *(len(reduce.present.seen) for reduce in reduces)]
        if self.parts is not None:  # which alone notices a backward where a cell is one rank
            reduced.append(self.parts.backwards)
        if not first and reduced != self.reduced:
            self._check_sums()
            clock.micro += 1
        self.reduced = reduced

    def check_converted(self) -> None:
        """ValueError for a converted model: much follows from the dtypes that it had at first."""
        for name, p in self.parameters().items():
            if p.dtype != (before := self.dtypes[name]):
                raise ValueError(
                    f"{name} was {before} when zpp_lab.shard took the model, and is {p.dtype} now: "
                    "convert the model before zpp_lab.shard, or leave it, and pass param_dtype= "
                    "for weights that travel and compute in another dtype, masters='split' for "
                    "parameters in bf16"
                )

    def _check_sums(self) -> None:
        """Sums can stay in the node only where the step's last micro-step is known beforehand."""
        recipe, config = self.wrapped.plan.recipe, self.wrapped.plan.recipe.config
        if recipe.node_sums and self.taken:
            world = "recipe.sharding.grads=world"
            world += " recipe.sharding.optimizer=world" if config.copied else ""
            raise ValueError(
                f"recipe {config.name}: recipe.{config.setting('grads')} keeps sums in the node "
                "until the last micro-step, which a user training loop does not announce: set "
                f"{world}, or model.set_requires_gradient_sync(False) before all but the last"
            )

    def _follow_trained(self) -> None:
        """Plan again where other parameters are trained from this step on."""
        wrapped, own, changed = self.wrapped, self.parameters(), False
        for module in self.modules if not wrapped.reduces and not self.begun else ():
            unit = {n: own[n] for n in parameter_order(module, {id(p): n for n, p in own.items()})}
            if unit:  # the root may have none
                check_dtypes(next(iter(unit)), unit)
            retrain(module)
        for module, reduce in zip(self.modules, wrapped.reduces, strict=False):
            trained = reduce.present.trained()
            if self.begun and wrapped.installed and (new := trained - reduce.present.known):
                raise ValueError(
                    f"{min(new)}.requires_grad was set between two micro-steps of a step: set it "
                    "after optimizer.step() and zero_grad()"
                )
            if trained != reduce.present.known and not self.begun:
                check_dtypes(reduce.present.names[0], {n: own[n] for n in trained})
                reduce.present.known, changed = trained, True
                retrain(module, reduce)
        if changed and wrapped.installed:
            wrapped.train({n for reduce in wrapped.reduces for n in reduce.present.known})
            self.kept.stale = bool(self.kept.updates)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph captures what runs."""
        return self.wrapped.clock.drawn is not None

    # ------------------------------------------------------------------ between ranks

    def _reduces(self, names: Names, others: bool) -> None:
        """A reduction of these parameters' gradients begins; `others`: than the unit's last one.

        Ranks that do not take the same would wait for each other or add up what does not belong
        together. All compare at the end of a backward. Those with other parameters than before ask
        already here, so that nothing of another size is sent; they hear then from the ranks that
        went on. On a CPU a transfer would hold those up, so all of them ask.
        """
        self.taken.append(names)
        self.digest.update(repr(names).encode())
        if self.captured:
            return
        if self.asked != (running := torch._C._current_graph_task_id()):
            self.asked = running
            self.check_converted()
            Variable._execution_engine.queue_callback(self._compare)  # type: ignore[attr-defined]
        if others or self.device.type == "cpu":
            self._compare()

    def _compare(self) -> None:
        """Raise ValueError on all ranks where their reductions since the step began differ."""
        if len(set(self.every(int.from_bytes(self.digest.digest()[:8], signed=True)))) == 1:
            return
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, self.taken, group=self.group)
        other = next(rank for rank, each in enumerate(every) if each != every[0])
        pairs = zip_longest(every[0], every[other], fillvalue=())
        name = min(next(set(one) ^ set(two) for one, two in pairs if one != two))
        raise ValueError(
            f"ranks 0 and {other} differ in when {name} has a gradient, so gradients of different "
            "parameters would be added up: use the same parameters on every rank, for instance by "
            "adding 0 * p.sum() of each unused parameter p to the loss, or by "
            "model.set_reduce_scatter_unused_params(True) of torch 2.13"
        )

    def every(self, value: int) -> list[int]:
        """Gather a value of each rank, on the host where a backend can."""
        on_host = "cpu:" in str(dist.get_backend_config(self.group))
        own = torch.tensor([value], device="cpu" if on_host else self.device)
        every = own.new_empty(dist.get_world_size(self.group))
        all_gather(every, own, group=self.group)
        return every.tolist()

    def _say(self, what: str) -> None:
        if what not in self.said and dist.get_rank() == 0:
            text = f"zpp_lab.shard: weights were changed outside of a step; the recipe {what}"
            print(text, file=sys.stderr, flush=True)
        self.said.add(what)

    # ------------------------------------------------------------------ the masters' bits

    def _changed(self) -> bool:
        assert self.marked is not None
        return any(self.every(int(self.marks() != self.marked)))

    def marks(self) -> Tensor:
        return mark_all([local(p) for p in self.parameters().values()], self.device)

    def _whole_marks(self, names: Collection[str]) -> Marks:
        """Add up the bits of whole parameters, which gives the same however they are sharded."""
        shards = self.wrapped.plan.recipe.shards
        marks: Marks = {}
        for name, p in self.parameters().items():
            if name in names and self.parts is not None:
                marks[name] = mark(*self.parts.in_whole(name, p), p.shape)
            elif name in names:
                first, _ = own_rows(p.shape, shards, self.rank % shards)
                marks[name] = mark(local(p).float(), first, p.shape)
        return added(marks, self.device, self.group if self.parts is None else None)

    # ------------------------------------------------------------------ between steps

    def settle(self) -> None:
        """Bring the step to its end, if it has ended."""
        norm = self.norm_at_end
        dropped = self.taken and all(p.grad is None for p in self.parameters().values())
        if not self.begun or (norm is None and not dropped):
            return
        if not self.taken:  # others may have reduced something
            self._compare()
        clock = self.wrapped.clock
        self.wrapped.reshard()
        if not self.kept.stale:  # where a step was dropped, of the weights as they are
            given = norm if norm is not None else torch.zeros((), device=self.device)
            self._kept().send(clock.step + 1, torch.isfinite(given), no_bytes())
        if norm is not None and self.wrapped.memories.planned and bool(torch.isfinite(norm)):
            self.wrapped.memories.commit(in_place=bool(self.graph and self.graph.step))
        self.norm_at_end, self.begun, self.marked = None, False, None
        clock.step, clock.micro = clock.step + 1, 0

    def _kept(self) -> Kept:
        self.kept.parameters = self.parameters() if self.kept.updates else {}
        return self.kept

    # ------------------------------------------------------------------ its state

    def state(self) -> dict[str, Any]:
        """The steps that are done, what nodes keep and what encoders remember; DTensors that share
        memory with what is used. Marks tell of which masters."""
        self.arrived = False
        kept = self._kept().state() if self._look(True) else self._kept().remembered()
        names = kept if self.group is None or self.parts is not None else ()
        return self._state(kept) | {"marks": self.awaited or self._whole_marks(names)}

    def _state(self, kept: dict[str, DTensor]) -> dict[str, Any]:
        self.wrapped.enter(self.wrapped.clock.step)
        memories = self.wrapped.memories
        for key, own in memories.planned.items():
            if key not in memories.old:  # of a fresh process too, for a checkpoint to be read into
                nothing = torch.zeros(own.rows, own.numel, device=self.device)
                memories.old[key] = own.memory.pack(nothing)[None]
        remembered = on_ranks(memories.state(), self.parameters())
        return {"step": self.wrapped.clock.step, "kept": kept, "memory": remembered}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse, before or after the weights are loaded. What nodes keep is followed in the
        next forward, once the masters are those that it was saved with."""
        self.norm_at_end, self.begun, self.arrived = None, False, False
        self.wrapped.clock.step = int(state["step"])
        own = self._state(self._kept().remembered())
        for name in ("kept", "memory"):
            for key in own[name].keys() & state[name].keys():
                local(own[name][key]).copy_(local(state[name][key]))
        self.there = own["kept"].keys() & state["kept"].keys()
        self.awaited = {n: m for n, m in state.get("marks", {}).items() if n in self.there}
        self.kept.stale, self.marked = bool(self.kept.updates), None


# Hooks stay for good: one that went with its model would be removed while torch walks through them.
_LOOPS: weakref.WeakSet[Loop] = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for loop in _of(optimizer):
        loop.check_converted()
        if loop.placing is not None and optimizer is not loop.placed:
            raise ValueError(OTHER)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for loop in _of(optimizer):
        loop.updated()


def _of(optimizer: Optimizer) -> list[Loop]:
    """The loops of whose models the optimizer has parameters."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [x for x in list(_LOOPS) if not own.isdisjoint(map(id, x.parameters().values()))]
