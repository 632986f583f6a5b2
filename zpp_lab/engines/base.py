"""What the trainer needs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from zpp_lab.codecs.errors import Telemetry
from zpp_lab.collectives.plan import Bytes, Plan
from zpp_lab.engines.rollout import Policy
from zpp_lab.models.loss import mean_loss

# Inputs and targets, int64 [B, T]; where some targets are IGNORED also their share, int64 [2], see
# models/loss.py.
Batch = tuple[Tensor, ...]
Batches = Callable[[int, int], Batch]  # (rank, micro-step) → batch, the same again


class NonFiniteError(FloatingPointError):
    """A NaN or Inf appeared in training; says where it was first seen."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(f"step {step}: {where}")
        self.step = step


@dataclass(frozen=True)
class StepResult:
    """One training step: mean loss over ranks and micro-steps, norm before clipping, and the bytes
    that all ranks sent by wire, {} where the engine cannot tell. `seconds`: of this process by part
    of the step, where the engine takes them; a GPU may still be at work when a part ends. Equal
    results may have taken different times."""

    loss: float
    grad_norm: float
    bytes: Bytes
    telemetry: Telemetry | None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


class Engine(Protocol):
    """Trains a model under a plan. Steps count from 0."""

    plan: Plan  # of the step that comes next
    plans: Mapping[int, Plan]  # of every phase, by the steps done when it begins
    built: dict[str, float]  # seconds of what building it consisted of, where it is known

    def step(
        self,
        step: int,
        lr: float,
        batches: Batches,
        telemetry: bool,
        ahead: Batches | None = None,
    ) -> StepResult:
        """One optimizer step; NonFiniteError before any weight or memory has changed, with
        train.clip_by=unit after. `ahead`: the batches of the next step, if it is a usual one
        without telemetry and nothing else is likely to be asked for before; an engine may begin
        it."""
        ...

    def enter(self, done: int) -> None:
        """Before a state of `done` steps is loaded: follow the plan of the step after them. Steps
        do so by themselves. Memories of wires go on where the plan before had the same."""
        assert len(self.plans) == 1

    def token_scores(self, step: int, batches: Iterable[Batch], wire: bool) -> Tensor:
        """Score every counted target with the wire's weights or with the master's: its loss in
        nats, and 1 where it is predicted (`models/loss.py`; of pairs, `pair_losses`). fp32 [2,
        tokens] on the CPU, in the batches' order, on every rank."""
        ...

    def token_losses(self, step: int, batches: Iterable[Batch], wire: bool) -> Tensor:
        """Return the losses of `token_scores`, fp32 [tokens]."""
        return self.token_scores(step, batches, wire)[0]

    def evaluate(self, step: int, batches: Iterable[Batch], wire: bool) -> float:
        """Mean of `token_losses`, whatever the batches' shapes."""
        return mean_loss(self.token_losses(step, batches, wire))

    def rollout(
        self, step: int, gather: str = "rollout", counted: bool = True, wire: bool = True
    ) -> AbstractContextManager[Policy]:
        """Gather the weights after `step` steps for generation, with the recipe's codec of that
        wire and noise of (seed, step). gather: `rollout` holds them whole; `token` gathers each
        unit in every pass, and gives the same bits. The next step's bytes count what this sends if
        it is `counted`. Without `wire` the master weights come, uncounted. RuntimeError at its end
        where weights changed meanwhile."""
        raise ValueError("this engine cannot generate: use engine=virtual or engine=fsdp")

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
