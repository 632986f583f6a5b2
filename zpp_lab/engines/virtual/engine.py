"""The virtual engine: all ranks of a cluster in one process, with a sharded run's numerics.

Ranks take turns. The weights are gathered once a step: every rank would decode the same
payload, so one copy serves all. Then each rank's gradient (`passes.py`) is encoded, decoded and
added to running sums, rank by rank and node by node (`reduction.py`), so memory does not grow with
the number of nodes. Sums, division, norm and update follow the order of a real run to the bit.
Between its first and its last rank a step never waits for the device.

Where nodes keep weights (`collectives/exchange.py`) all of them hold equal bits, so one copy serves
here too: `sources`, which then change with each step's update alone.

Where backward gathers other weights than forward (another codec, fresh noise) they take the place
of the forward's after it, as a second gather would bring them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs import Noise, kernels
from zpp_lab.codecs.errors import ErrorSums, Telemetry, telemetry
from zpp_lab.codecs.numerics import clip_factor, fold_sum, total_norm
from zpp_lab.collectives.context import Memories
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import Bytes, PassUse, Plan, StepUse, add_bytes, plans_by_step
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, FORWARD, ROLLOUT, UPDATE, WIRES, Wire
from zpp_lab.engines.base import Batch, Batches, Engine, NonFiniteError, StepResult
from zpp_lab.engines.frozen import Marks, check_marks, decode_shards, encode_shards, mark, mark_all
from zpp_lab.engines.fsdp.prefetch import Usage
from zpp_lab.engines.norm import rank_squares
from zpp_lab.engines.optim.build import (
    adamw,
    load_optimizer_state,
    optimizer_state,
    set_rate,
    update,
)
from zpp_lab.engines.rollout import Policy, check_mark, eager
from zpp_lab.engines.units import named_units, with_root
from zpp_lab.engines.virtual.passes import Grads, Passes
from zpp_lab.engines.virtual.reduction import Reduction, together
from zpp_lab.engines.watch import Watch, gathered_in_vain
from zpp_lab.models.loss import token_scores
from zpp_lab.models.objective import objective


class VirtualEngine(Engine):
    """Trains `model` (fp32, on its device) as `plan` says. The model's parameters become the
    gathered weights in `param_dtype`; the fp32 master weights are separate."""

    def __init__(self, model: nn.Module, plan: Plan, config: Config) -> None:
        self.model, self.plan, self.config = model, plan, config
        self.plans = plans_by_step(plan, config)
        self.cluster = plan.recipe.cluster
        self.seed = config.seed
        self.built: dict[str, float] = {}
        self.reduce_dtype = DTYPES[config.train.reduce_dtype]
        self.ledger = Ledger()
        self.weights = dict(model.named_parameters())
        self.device = next(iter(self.weights.values())).device
        self.marks = self._store_base()
        live = {n: p for n, p in self.weights.items() if n not in self.marks}
        self.master = {n: nn.Parameter(p.detach().clone()) for n, p in live.items()}
        for name, p in live.items():
            self.master[name].requires_grad_(p.requires_grad)
            p.data = p.data.to(DTYPES[config.train.param_dtype])
        passing = Residence.of(config).moments_pass
        self.optimizer = adamw(self.master, config.optimization, config.seed, passing)
        self.usage = Usage(with_root(model, named_units(model, config.engine.blocks_per_unit)))
        self.used: dict[int, PassUse] = {}  # the last step's micro-steps, the same on all ranks
        self.reduced: list[frozenset[str]] = []  # who had a gradient in its reductions
        self.rolled: Bytes = {}  # of rollouts since the last step
        self.memories = self._memories()
        self._make_buffers()
        self._follow()

    def _store_base(self) -> Marks:
        """Replace a frozen base by what every rank would decode of it, for good."""
        marks, world = {}, self.cluster.world
        for segment in (s for u in self.plan.units for s in u.stored.segments):
            p = self.weights[segment.name]
            whole = p.detach()
            marks[segment.name] = mark(whole, 0, tuple(p.shape))
            p.data = torch.empty_like(whole, dtype=DTYPES[self.config.train.param_dtype])
            decode_shards(segment, encode_shards(segment, whole, world), p.detach())
        return marks

    def _memories(self) -> Memories:
        return Memories(self.plan.memories, range(self.cluster.world))

    def _make_buffers(self) -> None:
        """Allocate what gathers encode, at places that stay."""
        dtype = DTYPES[self.config.train.param_dtype]
        self.sources = {n: p.detach() for n, p in self.master.items()}  # in param_dtype
        self.stale = self.plan.recipe.kept  # whether `sources` have still to be kept
        if dtype != torch.float32 or self.stale:
            self.sources = {n: p.to(dtype, copy=True) for n, p in self.sources.items()}
        self.own: list[str] | None = None  # whose weights backward gathers again

    def enter(self, done: int) -> None:
        plan = self._plan_at(done)
        if plan is self.plan:
            return
        self.plan, before = plan, self.memories
        self.memories = self._memories()
        self.memories.go_on(before)
        self._follow()

    def _plan_at(self, done: int) -> Plan:
        """Return the plan of the step after `done` steps."""
        return self.plans[max(first for first in self.plans if first <= done)]

    def _follow(self) -> None:
        """Allocate what every step under this plan writes, at places that stay."""
        own = [s.name for u in self.plan.units if u.own_backward for s in u.live(BACKWARD).segments]
        self.reductions = [
            Reduction(unit, self.device, self.ledger, self.memories)
            for unit in together(self.plan.units)
        ]
        if own == self.own:
            return  # what was captured reads and writes at the same places
        self.own = own
        self.forward = {n: torch.empty_like(self.weights[n]).detach() for n in own}
        self.backward = {n: torch.empty_like(self.weights[n]).detach() for n in own}
        # backward's own weights take the place of the forward's, so no two passes may overlap
        lanes = 1 if own else self.config.engine.lanes
        self.passes = Passes(self._backward, self.weights, self.config.engine, lanes)

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
        self._start(step)
        watch = Watch(ErrorSums() if telemetry else None)
        losses, grads = self._gradients(step, batches, watch)
        norm = total_norm(rank_squares(grads, self.plan, self.device))
        if not bool(torch.isfinite(norm)):
            self._explain(step, batches)
        self._check_bytes()
        for wire, traffic in self.rolled.items():
            self.ledger.add(wire, traffic)
        self.rolled = {}
        self.memories.commit()
        if self.config.train.clip:
            torch._foreach_mul_(list(grads.values()), clip_factor(norm, self.config.train.clip))
        self._update(grads, lr, step)
        if self.plan.recipe.kept:
            self._keep(step + 1, watch)
        loss = fold_sum(losses.flatten()) / losses.numel()
        errors = self._telemetry(watch.errors) if watch.errors else None
        self.enter(step + 1)
        return StepResult(float(loss), float(norm), dict(self.ledger.step), errors)

    def _telemetry(self, errors: ErrorSums) -> Telemetry:
        errors.drop(gathered_in_vain(self.plan, self._passes()))
        return telemetry(*errors.by_rank())

    def _gradients(self, step: int, batches: Batches, watch: Watch) -> tuple[Tensor, Grads]:
        """Return losses, fp64 [micro-steps, W], and the mean gradient, fp32 and whole."""
        self.memories.start(step)
        self._gather(step, FORWARD, self.weights, watch)
        self._gather(step, BACKWARD, self.backward, watch)
        for name, value in self.forward.items():  # where backward's differ
            value.copy_(self.weights[name].detach())
        shape = (self.plan.micro_steps, self.cluster.world)
        losses = torch.zeros(shape, dtype=torch.float64, device=self.device)
        total: Grads = {}
        self.used, self.reduced = {}, []
        for turns in self._reductions():
            waits = self.plan.gradients_wait
            times = 1 if waits else len(turns) // self.cluster.world
            for reduction in self.reductions:
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
                    for reduction in self.reductions:
                        reduction.add(rank, micro, local)
                    present, local = frozenset(local), {}
            self.reduced += [present] * times
            for reduction in self.reductions:
                for name, rows in reduction.mean(self.reduce_dtype).items():
                    own = self.master[name]
                    mean = rows.flatten()[: own.numel()].view(own.shape)  # without padding
                    total[name] = total[name] + mean if name in total else mean
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
        self._load(self.backward)  # the weights that backward gathers, where they differ
        (loss / self.plan.micro_steps).backward()
        self._load(self.forward)
        return loss.detach(), self.usage.taken()

    def _load(self, values: Mapping[str, Tensor]) -> None:
        if values:
            into = [self.weights[name].data for name in values]  # unseen by autograd
            torch._foreach_copy_(into, list(values.values()))

    def _accumulate(self, local: Grads, grads: Grads) -> Grads:
        """Add several micro-steps of a rank in reduce_dtype."""
        for name, grad in grads.items():
            if name in local:
                local[name] += grad
            else:
                local[name] = grad.to(self.reduce_dtype, copy=True)
        return local

    def _update(self, grads: Grads, lr: float, step: int) -> None:
        set_rate(self.optimizer, lr)
        for name, p in self.master.items():
            p.grad = grads.get(name)
        update(self.optimizer, step)
        self.optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ weights

    def _gather(self, step: int, wire: Wire, into: Mapping[str, Tensor], watch: Watch) -> None:
        """Gather the parameters that `into` holds, as `wire` brings them."""
        world = self.plan.recipe.shards
        noise = Noise.of_owners(self.seed, step, wire, range(world))
        if into and not self.plan.recipe.kept:
            self._round_sources()
        for unit in self.plan.units:
            layout = unit.live(wire)
            if layout.segments and all(s.name in into for s in layout.segments):
                sources = [self.sources[s.name] for s in layout.segments]
                payload = torch.empty(world, layout.nbytes, dtype=torch.uint8, device=self.device)
                errors = watch.room(layout, payload)
                kernels.encode(layout, sources, noise, payload, errors)
                for first in range(0, self.cluster.world, world):  # every copy
                    copies = range(first, first + world)
                    watch.encoded(wire, 0, copies, layout, errors)
                    if unit.repeats_forward:  # a real backward gathers the same bits once more
                        watch.encoded(BACKWARD, 0, copies, layout, errors)
                outs = [into[s.name].detach() for s in layout.segments]
                kernels.decode(layout, payload, outs)
                if watch.check:
                    watch.weights(step, wire, layout, outs, world)

    def _start(self, done: int) -> None:
        """Replicate the weights after `done` steps at the start, and after loading a state."""
        if not self.stale:
            return
        self.stale = False
        self._round_sources()
        if not self.plan.recipe.differences:
            self._keep(done, Watch())

    @torch.no_grad()
    def _keep(self, done: int, watch: Watch) -> None:
        """Send the new weights between nodes after `done` steps, under the last step's plan."""
        ranks = range(self.cluster.world)
        noise = Noise.of_owners(self.seed, done, UPDATE, ranks)
        for unit in self._plan_at(max(0, done - 1)).units:
            layout, differences = unit.update, unit.recipe.differences
            if not layout.segments:
                continue
            masters = [self.master[s.name].detach() for s in layout.segments]
            kept = [self.sources[s.name] for s in layout.segments]
            payload = torch.empty(len(ranks), layout.nbytes, dtype=torch.uint8, device=self.device)
            errors = watch.room(layout, payload)
            kernels.encode_update(layout, masters, kept, differences, noise, payload, errors)
            watch.encoded(UPDATE, 0, ranks, layout, errors)
            kernels.decode(layout, payload, kept, differences)

    def _round_sources(self) -> None:
        """Round master weights to param_dtype, which is encoded."""
        masters = {n: p.detach() for n, p in self.master.items()}
        if self.config.train.param_dtype == "fp32" and not self.plan.recipe.kept:
            self.sources = masters
        else:
            torch._foreach_copy_([self.sources[n] for n in masters], list(masters.values()))

    def _passes(self) -> tuple[PassUse, ...]:
        """Return what each micro-step of the last step ran."""
        return tuple(self.used[m] for m in sorted(self.used))

    def _check_bytes(self) -> None:
        """Count what a real run of this step sends besides reductions, which have counted theirs;
        then compare all bytes with the plan."""
        names = [u.unit.name for u in self.plan.units]
        use = StepUse(self._passes(), dict.fromkeys(names, tuple(self.reduced)))
        for leg in (leg for unit in self.plan.units for leg in unit.legs(use)):
            if WIRES[leg.wire].pattern != "hop":
                self.ledger.add(leg.wire, leg.traffic * leg.times)
        self.ledger.check(self.plan.step_bytes(use))

    # ------------------------------------------------------------------ the rest

    @contextmanager
    def rollout(
        self, step: int, gather: str = "rollout", counted: bool = True, wire: bool = True
    ) -> Iterator[Policy]:
        self.enter(step)
        self._start(step)
        marked = self._mark()
        if wire:
            self._gather(step, ROLLOUT, self.weights, Watch())
        else:
            self._load({n: p.detach() for n, p in self.master.items()})
        policy = Policy(self.model, range(self.cluster.world))
        self.model.eval()
        try:
            with eager(self.config.engine.compile), torch.no_grad():
                yield policy
        finally:
            policy.open = False
            self.model.train()
        check_mark(marked, self._mark())
        if counted and wire:
            passes = policy.passes if gather == "token" else None
            add_bytes(self.rolled, self.plan.rollout_bytes(passes))

    def _mark(self) -> Tensor:
        return mark_all(list(self.master.values()), self.device)

    def _explain(self, step: int, batches: Batches) -> None:
        """Repeat the step, a pure function of the state, and check every value."""
        self._gradients(step, batches, Watch(check=True))
        raise NonFiniteError(step, "the gradient norm overflowed although every gradient is finite")

    @torch.no_grad()
    def token_scores(self, step: int, batches: Iterable[Batch], wire: bool) -> Tensor:
        self.enter(step)
        if wire:
            self._start(step)
            self._gather(step, FORWARD, self.weights, Watch())
        else:
            self._load({n: p.detach() for n, p in self.master.items()})
        self.model.eval()
        pairs = ((b[0].to(self.device), b[1].to(self.device)) for b in batches)
        scores = [token_scores(self.model, x, y) for x, y in pairs]
        self.model.train()
        return torch.cat(scores, 1).cpu()

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": {n: p.detach() for n, p in self.master.items()},
            "optimizer": optimizer_state(self.optimizer, self.master),
            **({"base": self.marks} if self.marks else {}),
            **({"kept": self._remembered()} if self.plan.recipe.differences else {}),
            **({"memory": self.memories.state()} if self.memories.old else {}),
        }

    def _remembered(self) -> dict[str, Tensor]:
        """Return replicas of parameters that travel as differences: they are state."""
        self._start(0)
        return {name: self.sources[name] for unit in self.plan.units for name in unit.remembered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = sorted(set(self.master) ^ set(state["weights"]))
        if missing:
            raise ValueError(f"the checkpoint is of another model; {missing[0]} differs")
        check_marks(self.marks, state.get("base", {}))
        with torch.no_grad():
            for name, p in self.master.items():
                p.copy_(state["weights"][name])
        remembered = state.get("memory", {})
        for name, tensor in self.memories.make(remembered, self.device).items():
            tensor.copy_(remembered[name])
        load_optimizer_state(self.optimizer, self.master, state["optimizer"])
        self.stale, kept = self.plan.recipe.kept, state.get("kept", {})
        if self.plan.recipe.differences and kept:
            self._start(0)
            for name, value in self._remembered().items():
                if name in kept:  # another recipe's state may lack it: then the master, rounded
                    value.copy_(kept[name])
