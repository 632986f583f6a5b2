"""The virtual engine: all ranks of a cluster in one process, with a sharded run's numerics.

Ranks take turns. The weights are gathered once a step: every rank would decode the same
payload, so one copy serves all. Then each rank's gradient (`passes.py`) is encoded, decoded and
added to running sums, rank by rank and node by node (`reduction.py`), so memory does not grow with
the number of nodes. Sums, division, norm and update follow the order of a real run to the bit.
Between its first and its last rank a step never waits for the device.

Where nodes keep weights (`collectives/exchange.py`) all of them hold equal bits, so one copy serves
here too: `Cell.sources`, which then change with each step's update alone.

Where backward gathers other weights than forward (another codec, fresh noise) they take the place
of the forward's after it, as a second gather would bring them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs.errors import ErrorSums, Telemetry, telemetry
from zpp_lab.codecs.numerics import clip_factor, fold_sum, total_norm
from zpp_lab.collectives.plan import Bytes, PassUse, Plan, add_bytes
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, FORWARD, ROLLOUT
from zpp_lab.engines.base import Batch, Batches, Engine, NonFiniteError, StepResult
from zpp_lab.engines.fsdp.prefetch import Usage
from zpp_lab.engines.rollout import Policy, check_mark, eager
from zpp_lab.engines.units import named_units, with_root
from zpp_lab.engines.virtual.cell import Cell
from zpp_lab.engines.virtual.passes import Grads, Passes
from zpp_lab.engines.watch import Watch, gathered_in_vain
from zpp_lab.models.loss import token_scores
from zpp_lab.models.objective import objective


class VirtualEngine(Engine):
    """Trains `model` (fp32, on its device) as `plan` says: one copy of it, all of it in one
    `cell`."""

    def __init__(self, model: nn.Module, plan: Plan, config: Config) -> None:
        self.model, self.config, self.seed = model, config, config.seed
        self.built: dict[str, float] = {}
        self.reduce_dtype = DTYPES[config.train.reduce_dtype]
        self.cell = Cell(dict(model.named_parameters()), plan, config)
        self.cluster, self.device, self.plans = self.cell.cluster, self.cell.device, self.cell.plans
        self.usage = Usage(with_root(model, named_units(model, config.engine.blocks_per_unit)))
        self.used: dict[int, PassUse] = {}  # the last step's micro-steps, the same on all ranks
        self.reduced: list[frozenset[str]] = []  # who had a gradient in its reductions
        self.rolled: Bytes = {}  # of rollouts since the last step
        self._make_passes()

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        return self.cell.plan

    def enter(self, done: int) -> None:
        if self.cell.enter(done):
            self._make_passes()

    def _make_passes(self) -> None:
        # backward's own weights take the place of the forward's, so no two passes may overlap
        lanes = 1 if self.cell.own else self.config.engine.lanes
        self.passes = Passes(self._backward, self.cell.weights, self.config.engine, lanes)

    # ------------------------------------------------------------------ one step

    def step(
        self,
        step: int,
        lr: float,
        batches: Batches,
        telemetry: bool,
        ahead: Batches | None = None,
    ) -> StepResult:
        self.enter(step)
        cell = self.cell
        cell.ledger.start_step()
        cell.start(step)
        watch = Watch(ErrorSums() if telemetry else None)
        losses, grads = self._gradients(step, batches, watch)
        norm = total_norm(cell.squares(grads))
        if not bool(torch.isfinite(norm)):
            self._explain(step, batches)
        cell.check_bytes(self._passes(), self.reduced)
        for wire, traffic in self.rolled.items():
            cell.ledger.add(wire, traffic)
        self.rolled = {}
        cell.memories.commit()
        if self.config.train.clip:
            torch._foreach_mul_(list(grads.values()), clip_factor(norm, self.config.train.clip))
        cell.update(grads, lr, step)
        if self.plan.recipe.kept:
            cell.keep(step + 1, watch)
        loss = fold_sum(losses.flatten()) / losses.numel()
        errors = self._telemetry(watch.errors) if watch.errors else None
        self.enter(step + 1)
        return StepResult(float(loss), float(norm), dict(cell.ledger.step), errors)

    def _telemetry(self, errors: ErrorSums) -> Telemetry:
        errors.drop(gathered_in_vain(self.plan, self._passes()))
        return telemetry(*errors.by_rank())

    def _gradients(self, step: int, batches: Batches, watch: Watch) -> tuple[Tensor, Grads]:
        """Return losses, fp64 [micro-steps, W], and the mean gradient, fp32 and whole."""
        cell = self.cell
        cell.memories.start(step)
        cell.gather(step, FORWARD, cell.weights, watch)
        cell.gather(step, BACKWARD, cell.backward, watch)
        for name, value in cell.forward.items():  # where backward's differ
            value.copy_(cell.weights[name].detach())
        shape = (self.plan.micro_steps, self.cluster.world)
        losses = torch.zeros(shape, dtype=torch.float64, device=self.device)
        total: Grads = {}
        self.used, self.reduced = {}, []
        for turns in self._reductions():
            waits = self.plan.gradients_wait
            times = 1 if waits else len(turns) // self.cluster.world
            for reduction in cell.reductions:
                reduction.start((self.seed, step), times, watch)
            passes = self.passes.each(batches(*turn) for turn in turns)
            local: Grads = {}
            for (rank, micro), (loss, grads, use) in zip(turns, passes, strict=True):
                losses[micro, rank] = loss
                if self.used.setdefault(micro, use) != use:
                    raise ValueError(
                        f"rank {rank} ran other units of the model than the ranks before it: ranks "
                        "of a real cluster would wait for each other forever"
                    )
                if waits:
                    use.check_once()
                for name, grad in grads.items() if watch.check else ():
                    watch.gradient(step, rank, name, grad)
                local = self._accumulate(local, grads) if waits else grads
                if not waits or micro == self.plan.micro_steps - 1:
                    for reduction in cell.reductions:
                        reduction.add(rank, micro, local)
                    present, local = frozenset(local), {}
            self.reduced += [present] * times
            cell.mean(total, self.reduce_dtype)
        return losses, total

    def _reductions(self) -> list[list[tuple[int, int]]]:
        """Return each reduction's turns: ranks with their micro-steps, in the order of sums."""
        ranks, micros = range(self.cluster.world), range(self.plan.micro_steps)
        ranks = ranks if self.plan.recipe.config.order == "rank" else ranks[::-1]
        if self.plan.accumulate_last:
            return [[(rank, micro) for rank in ranks for micro in micros]]
        if not self.plan.recipe.node_sums:
            return [[(rank, micro) for rank in ranks] for micro in micros]
        each = self.cluster.gpus_per_node
        nodes = [ranks[i : i + each] for i in range(0, len(ranks), each)]
        return [[(rank, micro) for node in nodes for micro in micros for rank in node]]

    def _backward(self, *batch: Tensor) -> tuple[Tensor, PassUse]:
        """Run one rank's forward and backward: a `Pass` of passes.py."""
        self.usage.start()
        loss = objective(self.model, batch, self.config.rl)
        self.cell.load_weights(self.cell.backward)  # those that backward gathers, where they differ
        (loss / self.plan.micro_steps).backward()
        self.cell.load_weights(self.cell.forward)
        return loss.detach(), self.usage.taken()

    def _accumulate(self, local: Grads, grads: Grads) -> Grads:
        """Add several micro-steps of a rank in reduce_dtype."""
        for name, grad in grads.items():
            if name in local:
                local[name] += grad
            else:
                local[name] = grad.to(self.reduce_dtype, copy=True)
        return local

    def _passes(self) -> tuple[PassUse, ...]:
        """Return what each micro-step of the last step ran."""
        return tuple(self.used[m] for m in sorted(self.used))

    def _explain(self, step: int, batches: Batches) -> None:
        """Repeat the step, a pure function of the state, and check every value."""
        self._gradients(step, batches, Watch(check=True))
        raise NonFiniteError(step, "the gradient norm overflowed although every gradient is finite")

    # ------------------------------------------------------------------ the rest

    @contextmanager
    def rollout(
        self, step: int, gather: str = "rollout", counted: bool = True, wire: bool = True
    ) -> Iterator[Policy]:
        self.enter(step)
        self.cell.start(step)
        marked = self.cell.mark()
        if wire:
            self.cell.gather(step, ROLLOUT, self.cell.weights)
        else:
            self.cell.load_masters()
        policy = Policy(self.model, range(self.cluster.world))
        self.model.eval()
        try:
            with eager(self.config.engine.compile), torch.no_grad():
                yield policy
        finally:
            policy.open = False
            self.model.train()
        check_mark(marked, self.cell.mark())
        if counted and wire:
            passes = policy.passes if gather == "token" else None
            add_bytes(self.rolled, self.plan.rollout_bytes(passes))

    @torch.no_grad()
    def token_scores(self, step: int, batches: Iterable[Batch], wire: bool) -> Tensor:
        self.enter(step)
        if wire:
            self.cell.start(step)
            self.cell.gather(step, FORWARD, self.cell.weights)
        else:
            self.cell.load_masters()
        self.model.eval()
        pairs = ((b[0].to(self.device), b[1].to(self.device)) for b in batches)
        scores = [token_scores(self.model, x, y) for x, y in pairs]
        self.model.train()
        return torch.cat(scores, 1).cpu()

    def state_dict(self) -> dict[str, Any]:
        return self.cell.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cell.load(state)
