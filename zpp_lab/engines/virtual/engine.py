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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs.errors import ErrorSums, Telemetry, telemetry
from zpp_lab.codecs.numerics import clip_factor, fold_sum, total_norm
from zpp_lab.collectives.acts import FP32, ActsEncoder, Parts
from zpp_lab.collectives.context import Clock, EncodeObserver
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.pipe import Pipe
from zpp_lab.collectives.plan import Bytes, PassUse, Plan, add_bytes, leg_bytes, plans_by_step
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.cluster import CELL
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, FORWARD, ROLLOUT, TP_RAW
from zpp_lab.engines.base import Batch, Batches, Engine, NonFiniteError, StepResult
from zpp_lab.engines.fsdp.prefetch import Usage
from zpp_lab.engines.fsdp.watch import RankWatch
from zpp_lab.engines.rollout import Policy, captures, check_mark, eager
from zpp_lab.engines.units import named_units, with_root
from zpp_lab.engines.virtual.cell import Cell
from zpp_lab.engines.virtual.passes import Grads, Passes
from zpp_lab.engines.watch import Watch, gathered_in_vain, unit_not_finite
from zpp_lab.models.cut import Parted, cut_dim, merged_state, part_state
from zpp_lab.models.llama import Llama
from zpp_lab.models.loss import token_scores
from zpp_lab.models.objective import objective
from zpp_lab.models.stages import joined_stages, last_blocks, stage_state


class VirtualEngine(Engine):
    """Trains `model` (fp32, on its device) as `plan` says: one copy of it, a cell for each of its
    tensor parts (`models/cut.py`), or one for all of it."""

    def __init__(self, model: nn.Module, plan: Plan, config: Config) -> None:
        self.model, self.config, self.seed = model, config, config.seed
        self.built: dict[str, float] = {}
        self.reduce_dtype = DTYPES[config.train.reduce_dtype]
        self.plans, self.phase = plans_by_step(plan, config), 0
        self.clock, self.ledger = Clock(config.seed), Ledger()
        self.parts: Parts | None = None  # what tensor parts exchange
        self.pipe: Pipe | None = None  # what stages send each other
        lanes: Sequence[nn.Module] = [model]
        if isinstance(model, Parted):
            assert plan.parts is not None
            self.parts, lanes = Parts(plan.parts, self.clock, self.ledger), model.lanes
            model.join(model.lanes, self.parts)
        if plan.pipe is not None:
            assert isinstance(model, Llama)
            self.pipe = Pipe(plan.pipe, self.clock, self.ledger, range(len(lanes)))
            model.crossing = self.pipe.crossing(last_blocks(model.cfg.layers, plan.pipe.stages))
        self.exchanges: list[ActsEncoder] = [one for one in (self.parts, self.pipe) if one]
        self.tp = len(lanes)
        self.cells = [  # stage by stage, the tensor parts of each in order
            self._cell(dict(lane.named_parameters()), stage, t)
            for stage in range(config.cluster.pp)
            for t, lane in enumerate(lanes)
        ]
        self.cell = self.cells[0]
        self.cluster, self.device = self.cell.cluster, self.cell.device
        self.usage = Usage(with_root(model, named_units(model, config.engine.blocks_per_unit)))
        self.graphs = captures(model, config.engine, self.device)
        self.used: dict[int, PassUse] = {}  # the last step's micro-steps, the same on all ranks
        self.reduced: list[frozenset[str]] = []  # who had a gradient in its reductions
        self.rolled: Bytes = {}  # of rollouts since the last step
        planned = [p.name for unit in plan.units for p in unit.unit.parameters]
        self.names = planned if self.pipe is not None else list(dict(model.named_parameters()))
        whole = [n for n in self.names if cut_dim(n) is None] if self.parts else []
        self.shared = frozenset(whole)  # parameters that all tensor parts have
        self._make_passes()

    def _cell(self, weights: dict[str, nn.Parameter], stage: int, part: int) -> Cell:
        plans = {first: plan.stage(stage).cell(part) for first, plan in self.plans.items()}
        if self.pipe is not None:
            own = {p.name for u in plans[0].units for p in u.unit.parameters}
            weights = {name: p for name, p in weights.items() if name in own}
        return Cell(weights, plans, self.config)

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        return self.plans[self.phase]

    def enter(self, done: int) -> None:
        self.phase = max(first for first in self.plans if first <= done)
        if self.parts is not None:
            self.parts.follow(self.plan.parts)
        if self.pipe is not None:
            self.pipe.follow(self.plan.pipe)
        moved = [cell.enter(done) for cell in self.cells]
        if any(moved):
            self._make_passes()

    def _make_passes(self) -> None:
        # backward's own weights take the place of the forward's, so no two passes may overlap
        lanes = 1 if self.cell.own else self.config.engine.lanes
        weights = {
            _key(n, i % self.tp): p for i, c in enumerate(self.cells) for n, p in c.weights.items()
        }
        self.passes = Passes(self._backward, weights, self.config.engine, lanes)

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
        self.ledger.start_step()
        for cell in self.cells:
            cell.ledger.start_step()
            cell.start(step)
        errors = ErrorSums() if telemetry else None
        watches = self._watches(errors)
        losses, grads = self._gradients(step, batches, watches)
        norm = total_norm(self._squares(grads))
        by_unit = self.config.train.clip_by == "unit"
        if not bool(torch.isfinite(norm)) and not by_unit:
            self._explain(step, batches)
        sent = self._sent()
        if by_unit:
            self._clip_units(step, grads[0])
        elif self.config.train.clip:
            every = [grad for own in grads for grad in own.values()]
            torch._foreach_mul_(every, clip_factor(norm, self.config.train.clip))
        for cell, own, watch in zip(self.cells, grads, watches, strict=True):
            cell.memories.commit()
            cell.update(own, lr, step)
            if self.plan.recipe.kept:
                cell.keep(step + 1, watch)
        loss = fold_sum(losses.flatten()) / losses.numel()
        found = self._telemetry(errors) if errors is not None else None
        self.enter(step + 1)
        return StepResult(float(loss), float(norm), sent, found)

    def _clip_units(self, step: int, grads: Grads) -> None:
        """Clip each unit's gradients by their own norm."""
        norms = {}
        for unit in (each.unit for each in self.plan.units):
            own = {p.name: grads[p.name] for p in unit.parameters if p.name in grads}
            if own:
                norm = norms[unit.name] = total_norm(self.cell.squares(own))
                torch._foreach_mul_([*own.values()], clip_factor(norm, self.config.train.clip))
        if not bool(torch.stack([*norms.values()]).isfinite().all()):
            raise unit_not_finite(step, norms)

    def _watches(self, errors: ErrorSums | None = None, check: bool = False) -> list[Watch]:
        """Make what looks at each cell's wires."""
        cluster = self.config.cluster
        if not cluster.split:
            return [Watch(errors, check)]
        cells = dict.fromkeys(tuple(cluster.members(CELL, rank)) for rank in range(cluster.world))
        return [Watch(errors, check, cell) for cell in cells]

    def _squares(self, grads: Sequence[Grads]) -> Tensor:
        """Return the sum of squares of every process, in rank order: fp64. Parameters that all
        parts have count for the first."""
        found: list[Tensor] = []
        for i, (cell, own) in enumerate(zip(self.cells, grads, strict=True)):
            shared = self.shared if i % self.tp else frozenset()
            found.append(cell.squares({n: g for n, g in own.items() if n not in shared}))
        return torch.stack(found).unflatten(0, (-1, self.tp)).transpose(1, 2).flatten()

    def _sent(self) -> Bytes:
        """Compare the step's bytes with the plan; returns those of all ranks."""
        for cell in self.cells:
            cell.check_bytes(self._passes(), self.reduced)
        if self.exchanges:
            self.ledger.check(leg_bytes(self.plan.acts_legs()))
        sent = dict(self.ledger.step)
        for own in (*(cell.ledger.step for cell in self.cells), self.rolled):
            add_bytes(sent, own)
        self.rolled = {}
        return sent

    def _telemetry(self, errors: ErrorSums) -> Telemetry:
        errors.drop(gathered_in_vain(self.plan, self._passes()))
        return telemetry(*errors.by_rank())

    def _gradients(
        self, step: int, batches: Batches, watches: Sequence[Watch]
    ) -> tuple[Tensor, list[Grads]]:
        """Return losses, fp64 [micro-steps, W], and each cell's mean gradient, fp32 and whole."""
        for cell, watch in zip(self.cells, watches, strict=True):
            cell.memories.start(step)
            cell.gather(step, FORWARD, cell.weights, watch)
            cell.gather(step, BACKWARD, cell.backward, watch)
            for name, value in cell.forward.items():  # where backward's differ
                value.copy_(cell.weights[name].detach())
        self.clock.step = step
        shape = (self.plan.micro_steps, self.cluster.world)
        losses = torch.zeros(shape, dtype=torch.float64, device=self.device)
        total: list[Grads] = [{} for _ in self.cells]
        self.used, self.reduced = {}, []
        for turns in self._reductions():
            waits, by_unit = self.plan.gradients_wait, self.config.train.clip_by == "unit"
            times = 1 if waits else len(turns) // self.cluster.world
            for cell, watch in zip(self.cells, watches, strict=True):
                for reduction in cell.reductions:
                    reduction.start((self.seed, step), times, watch)
            passes = self._each(turns, batches, watches)
            local: Grads = {}
            for (rank, micro), (loss, grads, use) in zip(turns, passes, strict=True):
                losses[micro, rank] = loss
                if self.used.setdefault(micro, use) != use:
                    raise ValueError(
                        f"rank {rank} ran other units of the model than the ranks before it: ranks "
                        "of a real cluster would wait for each other forever"
                    )
                if waits or by_unit:
                    use.check_once(by_unit)
                for name in self.names if watches[0].check else ():
                    for i, (cell, watch) in enumerate(zip(self.cells, watches, strict=True)):
                        grad = grads.get(_key(name, i % self.tp)) if name in cell.weights else None
                        if grad is not None:
                            watch.gradient(step, rank, name, grad)
                local = self._accumulate(local, grads) if waits else grads
                if not waits or micro == self.plan.micro_steps - 1:
                    every = [self._own(local, i) for i in range(len(self.cells))]
                    for cell, own in zip(self.cells, every, strict=True):
                        for reduction in cell.reductions:
                            reduction.add(rank, micro, own)
                    present, local = frozenset().union(*every), {}
            self.reduced += [present] * times
            for cell, own in zip(self.cells, total, strict=True):
                cell.mean(own, self.reduce_dtype)
        if self.parts is not None:
            self._add_shared(total)
        return losses, total

    def _each(
        self, turns: Sequence[tuple[int, int]], batches: Batches, watches: Sequence[Watch]
    ) -> Iterator[tuple[Tensor, Grads, PassUse]]:
        """Yield each turn's pass. Tensor parts exchange, so noise depends on whose turn it is."""
        if not self.exchanges:
            yield from self.passes.each(batches(*turn) for turn in turns)
            return
        for turn in turns:
            at: Any = {"rank": turn[0], "micro": turn[1], "step": self.clock.step}
            lanes = [RankWatch(errors=each.errors, cell=each.cell, **at) for each in watches]
            if self.pipe is not None:
                self.pipe.stage = 0
            for one in self.exchanges:
                one.reader, self.clock.micro = turn
                one.observe = partial(self._observer, lanes)
            yield self.passes.eager(tuple(t.to(self.device) for t in batches(*turn)))

    def _observer(self, lanes: Sequence[EncodeObserver], part: int) -> EncodeObserver:
        """Return the observer of the cell that computes this part."""
        place = self.pipe.stage % self.pipe.plan.ranks if self.pipe is not None else 0
        return lanes[place * self.tp + part]

    def _own(self, grads: Grads, cell: int) -> Grads:
        """Return the gradients of a cell by name."""
        if not self.exchanges:
            return grads
        own = {name: _key(name, cell % self.tp) for name in self.cells[cell].weights}
        return {name: grads[key] for name, key in own.items() if key in grads}

    def _add_shared(self, grads: list[Grads]) -> None:
        """Sum gradients of parameters that all parts have, each of its slice of the tokens. Real
        ranks do so with their shards."""
        assert self.parts is not None
        for first in range(0, len(grads), self.tp):
            parts = grads[first : first + self.tp]
            for name in sorted(self.shared & parts[0].keys()):
                sums = self.parts.total([own[name] for own in parts])
                for own in parts:
                    own[name] = sums.clone()
        each = self.parts.plan.shared * FP32
        self.ledger.add(TP_RAW, self.parts.plan.traffic(each))

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
        for cell in self.cells:
            cell.load_weights(cell.backward)  # those that backward gathers, where they differ
        (loss / self.plan.micro_steps).backward()
        for cell in self.cells:
            cell.load_weights(cell.forward)
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
        self._gradients(step, batches, self._watches(check=True))
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
        graphs = self.graphs if gather == "rollout" else None
        policy = Policy(self.model, range(self.cluster.world), graphs=graphs)
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
        for cell in self.cells:
            if wire:
                cell.start(step)
                cell.gather(step, FORWARD, cell.weights)
            else:
                cell.load_masters()
        self.model.eval()
        pairs = ((b[0].to(self.device), b[1].to(self.device)) for b in batches)
        with ExitStack() as stack:
            for one in self.exchanges:
                stack.enter_context(one.uncounted())
            scores = [token_scores(self.model, x, y) for x, y in pairs]
        self.model.train()
        return torch.cat(scores, 1).cpu()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model's state, whatever its parts."""
        states = [cell.state() for cell in self.cells]
        if not self.exchanges:
            return states[0]
        firsts = range(0, len(states), self.tp)
        return joined_stages([merged_state(states[i : i + self.tp]) for i in firsts])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, cell in enumerate(self.cells):
            own = state if self.parts is None else part_state(state, self.tp, i % self.tp)
            cell.load(own if self.pipe is None else stage_state(own, cell.weights))


def _key(name: str, part: int) -> str:
    """Name a tensor part's parameter among those of all parts."""
    return f"{name}@{part}" if part else name
