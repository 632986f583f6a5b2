"""The real engine: one process a rank, FSDP2 with the recipe's collectives, NCCL or gloo.

Its losses, norms and weights equal the virtual engine's to the bit, so it follows the same
order: sums in rank order (`collectives/reduce.py`), the norm parameter by parameter and rank
by rank, losses micro-step by micro-step. Where FSDP2 is left untouched (recipe zero3 without
engine.ordered) the backend's own order decides, and only that differs.

The host waits for the device once a step, to read the loss and the norm before the optimizer
may change a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zpp_lab.codecs.errors import ErrorSums
from zpp_lab.collectives.ledger import LedgerError
from zpp_lab.collectives.transport import ProcessGroups, Transport, all_gather
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config import Config
from zpp_lab.dcp import read_into, saved_names, saved_step
from zpp_lab.engines.base import Batch, Batches, NonFiniteError, StepResult
from zpp_lab.engines.fsdp_watch import Finding, RankWatch, merged_telemetry
from zpp_lab.engines.fsdp_wrap import Wrapped, wrap
from zpp_lab.engines.norm import squares
from zpp_lab.models.init import initial_value
from zpp_lab.numerics import clip_factor, fold_sum, total_norm
from zpp_lab.optim import STATE, adamw, optimizer_state
from zpp_lab.plan import Bytes, Plan, add_bytes, no_bytes


class FsdpEngine:
    """Trains `model` as `plan` says; every rank of the default process group has one.

    `model` is whole on this rank's device, or on the meta device: then each rank makes its own
    shards of the initial weights. Its parameters become FSDP2's sharded ones.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        config: Config,
        device: torch.device,
        transport: Transport | None = None,
    ) -> None:
        self.model, self.plan, self.config, self.device = model, plan, config, device
        self.cluster = plan.recipe.cluster
        if transport is None:
            transport = ProcessGroups(self.cluster, Watchdog(config.engine.timeout_seconds))
        self.transport = transport
        self.rank = self.transport.rank
        self.wrapped: Wrapped = wrap(
            model,
            model.units(),  # type: ignore[operator]
            plan,
            self.transport,
            device,
            seed=config.seed,
            ordered=config.engine.ordered,
            offload=config.engine.offload,
        )
        self.root = cast(FSDPModule, model)
        if any(p.is_meta for p in model.parameters()):
            self._initialize()
        *units, root = self.wrapped.modules
        _prefetch([root, *units], config.engine.prefetch)
        self.clock = self.wrapped.clock
        self.parameters = dict(model.named_parameters())
        self.optimizer = adamw(self.parameters, config.train)

    def _initialize(self) -> None:
        """Fill this rank's shards, one whole parameter at a time."""
        self.model.to_empty(device="cpu" if self.config.engine.offload else self.device)
        layers, seed = self.config.model.layers, self.config.seed
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                whole = initial_value(name, tuple(p.shape), seed, layers)
                local = _local(p)
                local.copy_(_own_part(whole, self.rank, self.cluster.world))

    # ------------------------------------------------------------------ one step

    def step(self, step: int, lr: float, batches: Batches, telemetry: bool) -> StepResult:
        watch = RankWatch(step, self.rank, errors=ErrorSums()) if telemetry else None
        losses = self._gradients(step, batches, watch)
        losses, norm, finite = self._totals(losses)
        if not finite:
            self._explain(step, batches)
        fell_back = self.wrapped.fallbacks.check(self.config.engine.allow_fallback)
        sent = self._sent(as_planned=not fell_back)
        if self.config.train.clip:
            factor = clip_factor(norm, self.config.train.clip)
            for grad in self._grads().values():
                grad.mul_(factor.to(grad.device))
        self._update(lr)
        loss = fold_sum(losses.flatten()) / losses.numel()
        errors = merged_telemetry(watch.errors, self.device) if watch and watch.errors else None
        return StepResult(float(loss), float(norm), sent, errors)

    def _gradients(self, step: int, batches: Batches, watch: RankWatch | None) -> Tensor:
        """Forward and backward of every micro-step; this rank's losses, fp64 [micro-steps]."""
        self.wrapped.reshard()
        for unit in self.wrapped.installed:
            unit.ledger.start_step()
        micros = self.plan.micro_steps
        losses = torch.zeros(micros, dtype=torch.float64, device=self.device)
        self.clock.step, self.clock.grad, self.clock.master = step, True, False
        for micro in range(micros):
            last = micro == micros - 1
            self.clock.micro = micro
            self.clock.observer = watch.at(micro) if watch else None
            self.root.set_requires_gradient_sync(last or not self.plan.accumulate_last)
            self.root.set_reshard_after_backward(last or self.plan.recipe.config.stage == 3)
            inputs, targets = batches(self.rank, micro)
            loss = self.model(inputs.to(self.device), targets.to(self.device))
            losses[micro] = loss.detach()
            (loss / micros).backward()
        self.clock.observer = None
        return losses

    def _grads(self) -> dict[str, Tensor]:
        """This rank's shards of the mean gradient by name, without padding."""
        return {n: _local(p.grad) for n, p in self.parameters.items() if p.grad is not None}

    def _totals(self, losses: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Losses fp64 [micro-steps, W], the norm, and whether it is finite: alike on all ranks."""
        own = torch.cat((losses, squares(self._grads(), self.plan, self.device).view(1)))
        every = torch.empty(self.cluster.world, own.numel(), dtype=own.dtype, device=self.device)
        all_gather(every.view(-1), own)
        norm = total_norm(every[:, -1])
        return every[:, :-1].t().contiguous(), norm, bool(torch.isfinite(norm))

    def _sent(self, as_planned: bool) -> Bytes:
        """What all ranks sent; LedgerError names a unit that did not follow the plan.

        Every rank sends the same, so each compares its own count. Where FSDP2 is untouched its
        transfers are out of sight, and the figures are the plan's.
        """
        absent = frozenset(
            n for u in self.plan.units for n in u.unit.trainable if self.parameters[n].grad is None
        )
        if not self.wrapped.installed:
            return self.plan.step_bytes(absent)
        total = no_bytes()
        for unit in self.wrapped.installed:
            sent = {wire: t * self.cluster.world for wire, t in unit.ledger.step.items()}
            planned = no_bytes()
            add_bytes(planned, unit.plan.forward_bytes(), self.plan.gathers)
            add_bytes(planned, unit.plan.backward_bytes(), self.plan.gathers)
            add_bytes(planned, unit.plan.reduce_bytes(absent), self.plan.reductions)
            for wire, traffic in planned.items():
                if as_planned and sent[wire] != traffic:
                    raise LedgerError(
                        f"unit {unit.plan.unit.name}, {wire}: sent {sent[wire]}, planned {traffic} "
                        "bytes in this step (inside nodes, between nodes): the engine did not "
                        "follow the recipe; please report this"
                    )
            add_bytes(total, sent)
        return total

    def _update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _explain(self, step: int, batches: Batches) -> None:
        """The step is a pure function of the state: run it again and look at every value.

        No rank may stop half-way, so findings are collected and compared at the end.
        """
        self.optimizer.zero_grad(set_to_none=True)
        order = {name: i for i, name in enumerate(self.parameters)}
        watch = RankWatch(step, self.rank, order, check=True)
        self._gradients(step, batches, watch)
        if not self.wrapped.installed:
            self._look_at_means(watch)
        self.optimizer.zero_grad(set_to_none=True)
        found: list[Finding | None] = [None] * self.cluster.world
        dist.all_gather_object(found, watch.first)
        findings = sorted(f for f in found if f is not None)
        if findings:
            raise NonFiniteError(step, findings[0].where)
        raise NonFiniteError(step, "the gradient norm overflowed although every gradient is finite")

    def _look_at_means(self, watch: RankWatch) -> None:
        """Nothing of ours sees what an untouched FSDP2 sends; its result is all there is."""
        for name, grad in self._grads().items():
            if not bool(torch.isfinite(grad).all()):
                watch.mean(name)

    # ------------------------------------------------------------------ the rest

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[Batch], wire: bool) -> float:
        """Ranks take the batches in turn; all of them join every gather."""
        todo, world = list(batches), self.cluster.world
        self.wrapped.reshard()
        self.clock.step, self.clock.grad, self.clock.master = step, False, not wire
        self.clock.observer = None
        self.model.eval()
        rounds = -(-len(todo) // world)
        losses = torch.zeros(rounds, dtype=torch.float64, device=self.device)
        for i in range(rounds):
            inputs, targets = todo[min(i * world + self.rank, len(todo) - 1)]
            loss = self.model(inputs.to(self.device), targets.to(self.device))
            losses[i] = loss.double() * len(inputs)
        self.model.train()
        self.wrapped.reshard()
        self.clock.master = False
        every = torch.empty(world, rounds, dtype=losses.dtype, device=self.device)
        all_gather(every.view(-1), losses)
        in_order = every.t().reshape(-1)[: len(todo)]
        return float(fold_sum(in_order) / sum(len(inputs) for inputs, _ in todo))

    def state_dict(self) -> dict[str, Any]:
        """Sharded weights (DTensors), and the optimizer's state, both by parameter name."""
        return {
            "weights": {n: p.detach() for n, p in self.parameters.items()},
            "optimizer": optimizer_state(self.optimizer, self.parameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sharded or whole tensors by name, of this model on any cluster.

        ValueError when they are another model's.
        """
        differing = sorted(set(self.parameters) ^ set(state["weights"]))
        if differing:
            raise ValueError(f"the checkpoint is of another model; it differs in {differing[0]}")
        self.wrapped.reshard()
        self._make_optimizer_state(state["optimizer"]["step"])
        with torch.no_grad():
            for name, p in self.parameters.items():
                self._put(p, state["weights"][name])
            for key, values in state["optimizer"].items():
                for name, value in values.items():
                    self._put(self.optimizer.state[self.parameters[name]][key], value)

    def load_checkpoint(self, path: Path) -> int:
        """Read this rank's part of a checkpoint that any cluster wrote; returns its step."""
        names = saved_names(path)
        own = {f"weights.{n}" for n in self.parameters}
        differing = sorted(own ^ {n for n in names if n.startswith("weights.")})
        if differing:
            raise ValueError(f"{path} is of another model; it differs in {differing[0]}")
        self._make_optimizer_state(n for n in self.parameters if f"optimizer.step.{n}" in names)
        self.wrapped.reshard()
        read_into(path, self.state_dict())
        return saved_step(path)

    def _make_optimizer_state(self, names: Iterable[str]) -> None:
        """Zeros in place of the optimizer's state: for the named parameters, none for others."""
        self.optimizer.state.clear()
        for name in names:
            p = self.parameters[name]
            zeros = {key: torch.zeros_like(p.detach()) for key in STATE if key != "step"}
            self.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}

    def _put(self, into: Tensor, value: Tensor) -> None:
        whole = isinstance(into, DTensor) and not isinstance(value, DTensor)
        part = _own_part(value, self.rank, self.cluster.world) if whole else _local(value)
        _local(into).copy_(part)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_part(whole: Tensor, rank: int, world: int) -> Tensor:
    """FSDP2's cut along dimension 0, without padding."""
    rows = -(-whole.shape[0] // world)
    return whole[rank * rows : (rank + 1) * rows]


def _prefetch(modules: Sequence[FSDPModule], ahead: int) -> None:
    """While a unit computes, the next ones are gathered. `modules` in the order of the forward,
    the root first. FSDP2 looks one unit ahead in backward by itself."""
    if ahead == 0:
        return
    for i, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(list(modules[i + 1 : i + 1 + ahead]))
        if ahead > 1 and i > 1:
            before = list(modules[max(1, i - ahead) : i])
            module.set_modules_to_backward_prefetch(before[::-1])
