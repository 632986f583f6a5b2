"""A training loop that is not ours, as its model and its optimizers let us see it.

Noise, phases, memories and weights that nodes keep follow steps, of which a foreign loop tells
nothing. A step begins with the first forward with gradients after the last step's end; each
further one is a micro-step. It ends when an optimizer has updated one of the model's parameters,
which a hook on all of torch's optimizers sees. What follows from its end is done once it is needed:
before the next forward, or when the state is asked for; by then every optimizer has had its turn.

Where gradients that were reduced are gone before any optimizer took them, the loop has dropped the
step (a GradScaler does), or has updated by other means: the next step begins and memories stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from zpp_lab.codecs.numerics import total_norm
from zpp_lab.collectives.plan import Plan, no_bytes
from zpp_lab.collectives.transport import all_gather
from zpp_lab.engines.fsdp.comm import in_backward
from zpp_lab.engines.fsdp.kept import Kept, on_ranks
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.norm import squares
from zpp_lab.engines.optim.shards import local


class Loop:
    """Moves the clock of a wrapped model. `plans`: each by the steps done when it begins; `group`:
    of the ranks over which the model is cut, where the world has more."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: Wrapped,
        plans: Mapping[int, Plan],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.model, self.wrapped, self.plans = model, wrapped, plans
        self.device, self.group = device, group
        self.begun, self.phase = False, 0  # whether a step is under way; the first step of its plan
        self.norm_at_end: Tensor | None = None  # of a step that an optimizer has ended
        self.kept = Kept(wrapped.installed, {}, group)
        self.follows_updates = bool(self.kept.updates or any(p.memories for p in plans.values()))
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after)
        model.register_load_state_dict_post_hook(self._loaded)
        me = weakref.ref(self)  # the model holds us, torch's list of hooks does not
        handle = register_optimizer_step_post_hook(lambda o, *_: _tell(me(), o))
        weakref.finalize(self, handle.remove)

    @property
    def plan(self) -> Plan:
        return self.plans[self.phase]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of the gradients, fp64: sums in rank order, the same in every run."""
        grads = {n: local(p.grad) for n, p in self._parameters().items() if p.grad is not None}
        own = squares(grads, self.plan, self.device).view(1)
        shards = self.plan.recipe.shards
        every = own.new_empty(self.plan.recipe.cluster.world)
        all_gather(every, own, group=self.group)
        return total_norm(every[:shards])

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())  # `to_empty` may put others in their places

    # ------------------------------------------------------------------ what the loop does

    def updated(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        own = {id(p) for p in self.model.parameters()}
        theirs = (p for group in optimizer.param_groups for p in group["params"])
        if self.norm_at_end is not None or not self.begun or own.isdisjoint(map(id, theirs)):
            return
        if self.follows_updates and in_backward():
            raise RuntimeError(
                f"recipe {self.plan.recipe.config.name} needs optimizer steps after backward, but "
                "an optimizer stepped during it: step once all gradients are complete"
            )
        self.norm_at_end = self.norm() if self.follows_updates else torch.zeros(())

    def _before(self, *_: Any) -> None:
        if in_backward():
            return  # activation checkpointing computes a forward again
        clock = self.wrapped.clock
        self.settle()
        clock.grad = torch.is_grad_enabled()
        if self.kept.stale:  # as the last step would have sent it
            self._enter(max(0, clock.step - 1))
            self._kept().start(clock.step)
        self._enter(clock.step)
        if clock.grad and self.begun:
            self._check_sums()
            clock.micro += 1
        elif clock.grad:
            self.begun, clock.micro = True, 0
            self.wrapped.memories.start(clock.step)

    def _check_sums(self) -> None:
        """Sums can stay in the node only where the step's last micro-step is known beforehand."""
        config = self.plan.recipe.config
        if self.plan.recipe.node_sums and any(u.present.taken for u in self.wrapped.installed):
            world = "recipe.sharding.grads=world"
            world += " recipe.sharding.optimizer=world" if config.copied else ""
            raise ValueError(
                f"recipe {config.name}: recipe.{config.said('grads')} keeps sums in the node "
                "until the last micro-step, which a user training loop does not announce: set "
                f"{world}, or model.set_requires_gradient_sync(False) before all but the last"
            )

    def _after(self, *_: Any) -> None:
        self.wrapped.fallbacks.check(allowed=False)
        self.kept.wait()  # an optimizer may step next
        if not torch.is_grad_enabled():
            self.wrapped.reshard()  # an optimizer may step before the next forward

    def _loaded(self, *_: Any) -> None:
        self.kept.stale = bool(self.kept.updates)

    # ------------------------------------------------------------------ between steps

    def settle(self) -> None:
        """Bring the step to its end, if it has ended."""
        units, norm = self.wrapped.installed, self.norm_at_end
        reduced = any(unit.present.taken for unit in units)
        dropped = reduced and all(p.grad is None for p in self.model.parameters())
        if not self.begun or (norm is None and not dropped):
            return
        clock = self.wrapped.clock
        self.wrapped.reshard()
        if not self.kept.stale:  # where a step was dropped, of the weights as they are
            given = norm if norm is not None else torch.zeros((), device=self.device)
            self._kept().send(clock.step + 1, given, no_bytes(), None)
        if norm is not None and self.wrapped.memories.planned and bool(torch.isfinite(norm)):
            self.wrapped.memories.commit()
        for unit in units:
            unit.present.taken = []
        self.norm_at_end, self.begun = None, False
        clock.step, clock.micro = clock.step + 1, 0

    def _kept(self) -> Kept:
        self.kept.parameters = self._parameters() if self.kept.updates else {}
        return self.kept

    def _enter(self, done: int) -> None:
        """Take the plan of the step after `done` steps, and its memories."""
        first = max(first for first in self.plans if first <= done)
        if first != self.phase:
            before, self.phase = self.wrapped.memories, first
            self.wrapped.follow(list(self.plans).index(first))
            self.wrapped.memories.go_on(before)

    # ------------------------------------------------------------------ its state

    def state(self) -> dict[str, Any]:
        """The steps that are done, what nodes keep and what encoders remember; DTensors that share
        memory with what is used."""
        self.settle()
        return self._state(self._kept().state())

    def _state(self, kept: dict[str, DTensor]) -> dict[str, Any]:
        self._enter(self.wrapped.clock.step)
        memories = self.wrapped.memories
        for key, own in memories.planned.items():
            if key not in memories.old:  # of a fresh process too, for a checkpoint to be read into
                nothing = torch.zeros(own.rows, own.numel, device=self.device)
                memories.old[key] = own.memory.pack(nothing)[None]
        remembered = on_ranks(memories.state(), self._parameters())
        return {"step": self.wrapped.clock.step, "kept": kept, "memory": remembered}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse; weights are there already."""
        self.norm_at_end, self.begun = None, False
        self.wrapped.clock.step = int(state["step"])
        own = self._state(self._kept().remembered())
        for name in ("kept", "memory"):
            for key in own[name].keys() & state[name].keys():
                local(own[name][key]).copy_(local(state[name][key]))
        self.kept.loaded(state["kept"])


def _tell(loop: Loop | None, optimizer: Optimizer) -> None:
    if loop is not None:
        loop.updated(optimizer)
