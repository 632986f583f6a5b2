"""The virtual engine: all ranks of a cluster in one process, with a sharded run's numerics.

Ranks take turns. The weights are gathered once a step: every rank would decode the same
payload, so one copy serves all. Then each rank's gradient is encoded, decoded and added to
running sums, rank by rank and node by node (`reduction.py`), so memory does not grow with the
number of nodes. Sums, division, norm and update follow the order of a real run to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab import ops
from zpp_lab.codecs import Noise, noise_key
from zpp_lab.codecs.errors import ErrorSums
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.traffic import gather_traffic, secondary_traffic
from zpp_lab.config import Config, Wire
from zpp_lab.engines.base import Batch, Batches, NonFiniteError, StepResult
from zpp_lab.engines.reduction import Reduction
from zpp_lab.engines.watch import Watch
from zpp_lab.numerics import clip_factor, fold_sum, square_norms, total_norm
from zpp_lab.optim import adamw, load_optimizer_state, optimizer_state
from zpp_lab.plan import Plan, UnitPlan
from zpp_lab.recipe import DTYPES

Grads = dict[str, Tensor]


class VirtualEngine:
    """Trains `model` (fp32, on its device) as `plan` says. The model's parameters become the
    gathered weights in `param_dtype`; the fp32 master weights are kept beside them."""

    def __init__(self, model: nn.Module, plan: Plan, config: Config) -> None:
        self.model, self.plan, self.config = model, plan, config
        self.cluster = plan.recipe.cluster
        self.seed = config.seed
        self.reduce_dtype = DTYPES[config.train.reduce_dtype]
        self.ledger = Ledger()
        self.weights = dict(model.named_parameters())
        self.master = {n: nn.Parameter(p.detach().clone()) for n, p in self.weights.items()}
        for name, p in self.weights.items():
            self.master[name].requires_grad_(p.requires_grad)
            p.data = p.data.to(DTYPES[config.train.param_dtype])
        self.device = next(iter(self.weights.values())).device
        self.optimizer = adamw(self.master, config.train)
        self.trainable = {n for n, p in self.master.items() if p.requires_grad}
        self.absent: frozenset[str] = frozenset()  # trainable, but the last step gave no gradient

    # ------------------------------------------------------------------ one step

    def step(self, step: int, lr: float, batches: Batches, telemetry: bool) -> StepResult:
        self.ledger.start_step()
        watch = Watch(ErrorSums() if telemetry else None)
        losses, grads = self._gradients(step, batches, watch)
        norm = self._norm(grads)
        if not bool(torch.isfinite(norm)):
            self._explain(step, batches)
        self.ledger.check(self.plan.step_bytes(self.absent))
        if self.config.train.clip:
            factor = clip_factor(norm, self.config.train.clip)
            for grad in grads.values():
                grad.mul_(factor)
        self._update(grads, lr)
        loss = fold_sum(losses.flatten()) / losses.numel()
        errors = watch.errors.telemetry() if watch.errors else None
        return StepResult(float(loss), float(norm), dict(self.ledger.step), errors)

    def _gradients(self, step: int, batches: Batches, watch: Watch) -> tuple[Tensor, Grads]:
        """Losses, fp64 [micro-steps, W], and the mean gradient, fp32 and whole."""
        forward, backward = self._gather_both(step, watch)
        shape = (self.plan.micro_steps, self.cluster.world)
        losses = torch.zeros(shape, dtype=torch.float64, device=self.device)
        total: Grads = {}
        for micros in self._reductions():
            reductions = [
                self._reduction(unit, step, micros[-1], watch) for unit in self.plan.units
            ]
            for rank in self._ranks():
                local: Grads = {}
                for micro in micros:
                    losses[micro, rank] = self._backward(batches(rank, micro), forward, backward)
                    self._accumulate(local, rank, step, watch)
                for reduction in reductions:
                    reduction.add(rank, local)
            self.absent = frozenset(self.trainable - set(local))
            for reduction in reductions:
                self._add_mean(total, reduction.finish())
        return losses, total

    def _reductions(self) -> list[range]:
        """The micro-steps that each reduction covers."""
        n = self.plan.micro_steps
        return [range(n)] if self.plan.accumulate_last else [range(m, m + 1) for m in range(n)]

    def _ranks(self) -> Sequence[int]:
        ranks = range(self.cluster.world)
        return ranks if self.plan.recipe.config.order == "rank" else ranks[::-1]

    def _backward(self, batch: Batch, forward: Grads, backward: Grads) -> Tensor:
        """One rank's forward and backward; gradients are left on the model."""
        inputs, targets = (t.to(self.device) for t in batch)
        loss = self.model(inputs, targets)
        self._load(backward)  # the weights that backward gathers, where they differ
        (loss / self.plan.micro_steps).backward()
        self._load(forward)
        return loss.detach()

    def _load(self, values: Grads) -> None:
        for name, value in values.items():
            self.weights[name].data.copy_(value)

    def _accumulate(self, local: Grads, rank: int, step: int, watch: Watch) -> None:
        """Move the model's gradients into `local`; several micro-steps add up in reduce_dtype."""
        for name, p in self.weights.items():
            if p.grad is None:
                continue
            watch.gradient(step, rank, name, p.grad)
            if len(self._reductions()[0]) == 1:
                local[name] = p.grad
            elif name in local:
                local[name] += p.grad
            else:
                local[name] = p.grad.to(self.reduce_dtype)
            p.grad = None

    def _add_mean(self, total: Grads, sums: dict[str, Tensor]) -> None:
        """Divide a unit's sums [W, n] by the world and add them to the step's gradient."""
        for name, rows in sums.items():
            mean = rows.to(self.reduce_dtype).div_(self.cluster.world).to(torch.float32)
            shape = self.master[name].shape
            whole = mean.flatten()[: shape.numel()].view(shape)
            total[name] = total[name] + whole if name in total else whole

    def _norm(self, grads: Grads) -> Tensor:
        partials = torch.zeros(self.cluster.world, dtype=torch.float64, device=self.device)
        for unit in self.plan.units:
            for p in unit.unit.parameters:
                if p.name in grads:
                    rows = ops.padded_rows(grads[p.name], self.cluster.world, p.shard_numel)
                    partials += square_norms(rows)
        return total_norm(partials)

    def _update(self, grads: Grads, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, p in self.master.items():
            p.grad = grads.get(name)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ weights

    def _gather_both(self, step: int, watch: Watch) -> tuple[Grads, Grads]:
        """Load the forward's weights. Where backward's differ, return both of them by name."""
        self._gather(step, "weights_forward", self.weights, watch)
        own = [p.name for u in self.plan.units if u.own_backward for p in u.unit.parameters]
        backward = {name: torch.empty_like(self.weights[name]) for name in own}
        self._gather(step, "weights_backward", backward, watch)
        return {name: self.weights[name].detach().clone() for name in own}, backward

    def _gather(self, step: int, wire: Wire, into: Mapping[str, Tensor], watch: Watch) -> None:
        """Gather the parameters that `into` holds, as `wire` brings them, and count it."""
        world = self.cluster.world
        ranks = tuple(range(world))
        noise = Noise(noise_key(self.seed, step, 0, wire), ranks, ranks)
        for unit in self.plan.units:
            layout = unit.forward if wire == "weights_forward" else unit.backward
            if all(s.name in into for s in layout.segments):
                dtype = DTYPES[self.config.train.param_dtype]
                sources = [self.master[s.name].detach().to(dtype) for s in layout.segments]
                payload = torch.empty(world, layout.nbytes, dtype=torch.uint8, device=self.device)
                ops.encode(layout, sources, noise, payload)
                outs = [into[s.name].detach() for s in layout.segments]
                ops.decode(layout, payload, outs)
                watch.weights(step, wire, layout, sources, outs, payload)
            self._count_gather(unit, wire, layout.nbytes)

    def _count_gather(self, unit: UnitPlan, wire: Wire, row: int) -> None:
        """What this gather of a real run sends in a step, micro-step by micro-step."""
        if wire == "weights_backward" and not unit.gathers_backward:
            return
        if wire == "weights_backward" and self.plan.recipe.config.secondary:
            traffic = secondary_traffic(self.cluster, row)
        else:
            traffic = gather_traffic(self.cluster, row, unit.hierarchical)
        self.ledger.add(wire, traffic * self.plan.gathers)

    # ------------------------------------------------------------------ the rest

    def _reduction(self, unit: UnitPlan, step: int, micro: int, watch: Watch) -> Reduction:
        return Reduction(unit, self.seed, step, micro, self.device, self.ledger, watch)

    def _explain(self, step: int, batches: Batches) -> None:
        """The step is a pure function of the state: run it again and look at every value."""
        self._gradients(step, batches, Watch(check=True))
        raise NonFiniteError(step, "the gradient norm overflowed although every gradient is finite")

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[Batch], wire: bool) -> float:
        if wire:
            self._gather(step, "weights_forward", self.weights, Watch())
        else:
            self._load({n: p.detach() for n, p in self.master.items()})
        self.model.eval()
        losses, rows = [], 0
        for x, y in batches:
            losses.append(self.model(x.to(self.device), y.to(self.device)).double() * len(x))
            rows += len(x)
        self.model.train()
        return float(fold_sum(torch.stack(losses)) / rows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": {n: p.detach() for n, p in self.master.items()},
            "optimizer": optimizer_state(self.optimizer, self.master),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = sorted(set(self.master) ^ set(state["weights"]))
        if missing:
            raise ValueError(f"the checkpoint is of another model; it differs in {missing[0]}")
        with torch.no_grad():
            for name, p in self.master.items():
                p.copy_(state["weights"][name])
        load_optimizer_state(self.optimizer, self.master, state["optimizer"])
