"""The state of one rank's engine: what checkpoints keep, and how it is read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpp_lab.codecs.planes import joined
from zpp_lab.engines.frozen import check_marks
from zpp_lab.engines.fsdp.base import FrozenBase, own_rows
from zpp_lab.engines.fsdp.kept import Kept, on_ranks
from zpp_lab.engines.fsdp.resident import Masters
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.optim.build import (
    AdamW,
    check_state,
    optimizer_state,
    zero_state,
)
from zpp_lab.engines.optim.shards import detached, local
from zpp_lab.engines.parts import Regions
from zpp_lab.runs.checkpoint.read import Saved

State = dict[str, Any]


class EngineState:
    """Weights, optimizer, residuals and node-replicated weights of one rank."""

    def __init__(
        self,
        wrapped: Wrapped,
        parameters: Mapping[str, nn.Parameter],
        masters: Masters,
        kept: Kept,
        optimizer: AdamW,
        base: FrozenBase,
        regions: Regions | None = None,
    ) -> None:
        self.wrapped, self.parameters, self.kept = wrapped, parameters, kept
        self.masters, self.optimizer, self.base = masters, optimizer, base
        self.regions = regions
        self.names = regions.names if regions is not None else set(parameters)
        self.rank, self.shards = wrapped.memories.ranks[0], wrapped.plan.recipe.shards

    def save(self) -> State:
        """Sharded weights (DTensors), and the optimizer's state, both by parameter name."""
        base = {"base": dict(self.base.marks)} if self.base.marks else {}
        state = self._now(self.kept.state()) | base
        return self.regions.to_save(state) if self.regions is not None else state

    def _now(self, kept: Mapping[str, DTensor]) -> State:
        memories, group = self.wrapped.memories.state(), self.kept.group
        return {
            "weights": {n: detached(p) for n, p in self.parameters.items()},
            **({"low": dict(self.masters.low)} if self.masters.low else {}),
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            **({"kept": dict(kept)} if kept else {}),
            **({"memory": on_ranks(memories, self.parameters, group)} if memories else {}),
        }

    def load(self, state: State, device: torch.device) -> None:
        """Take sharded or whole tensors by name, of this model on any cluster. ValueError when they
        are another model's."""
        differing = sorted(self.names ^ set(state["weights"]))
        if differing:
            raise ValueError(f"the checkpoint is of another model; {differing[0]} differs")
        if self.regions is not None:
            state = self.regions.of_whole(state)
        check_marks(self.base.marks, state.get("base", {}))
        kept = state["optimizer"]
        dtypes = {k: {n: t.dtype for n, t in named.items()} for k, named in kept.items()}
        check_state(self.optimizer, self.parameters, dtypes)
        self._make_optimizer_state(kept.get("step", {}))
        with torch.no_grad():
            low = state.get("low", {})
            for name, p in self.parameters.items():
                own = self._own(p, state["weights"][name])
                below = self._own(p, low[name]) if name in low else None
                self.masters.put(
                    name, p, own if below is None else joined(own, below.to(own.device))
                )
            for key, values in kept.items():
                for name, value in values.items():
                    self._put(self.optimizer.state[self.parameters[name]][key], value)
            remembered = state.get("kept", {})
            for name, own in self.kept.remembered().items() if remembered else ():
                if name in remembered:
                    self._put(own, remembered[name])
        self.kept.loaded(remembered)
        rows = state.get("memory", {})
        for name, mine in self.wrapped.memories.make(rows, device).items():
            value = rows[name]
            whole = not isinstance(value, DTensor)
            mine.copy_(value[self.rank : self.rank + 1] if whole else local(value))

    def read(self, saved: Saved, agreed: Callable[[Callable[[], None]], None]) -> None:
        """Read this rank's part of a checkpoint for which `make_room` has been called."""
        state, there = self._now(self.kept.remembered()), saved.kept_names
        state["kept"] = {n: t for n, t in state.get("kept", {}).items() if n in there}
        into = self.regions.to_read(state) if self.regions is not None else state
        agreed(lambda: saved.read_into(into))
        self.kept.loaded(there)

    def make_room(self, saved: Saved, memories: Iterable[str] | None, device: torch.device) -> None:
        """Check that a checkpoint fits this run, and make the optimizer's states and memories."""
        differing = sorted(self.names ^ set(saved.shapes))
        if differing:
            raise ValueError(f"{saved.path} is of another model; {differing[0]} differs")
        check_marks(self.base.marks, saved.marks)
        others = self.names - self.parameters.keys()  # in other stages
        states = {
            key: {n: dtype for n, dtype in named.items() if n not in others}
            for key, named in saved.states().items()
        }
        check_state(self.optimizer, self.parameters, states)
        self._make_optimizer_state(states.get("step", {}))
        own = set(saved.memories() if memories is None else memories)
        self.wrapped.memories.make(own, device)

    def _make_optimizer_state(self, names: Iterable[str]) -> None:
        """Zeros in place of the optimizer's state: for the named parameters, none for others."""
        self.optimizer.state.clear()
        for name in names:
            p = self.parameters[name]
            self.optimizer.state[p] = zero_state(self.optimizer, p)

    def _put(self, into: Tensor, value: Tensor) -> None:
        local(into).copy_(self._own(into, value))

    def _own(self, into: Tensor, value: Tensor) -> Tensor:
        """Return this rank's rows of a value for `into`, sharded as it is or whole."""
        if isinstance(into, DTensor) and not isinstance(value, DTensor):
            return value[slice(*own_rows(value.shape, self.shards, self.rank % self.shards))]
        return local(value)
