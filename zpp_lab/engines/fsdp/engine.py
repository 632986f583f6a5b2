"""The real engine: one process a rank, FSDP2 with the recipe's collectives, NCCL or gloo.

Its losses, norms and weights equal the virtual engine's to the bit, so it follows the same
order: sums in rank order (`collectives/reduce.py`), the norm parameter by parameter and rank
by rank, losses micro-step by micro-step. Where FSDP2 is left untouched (recipe zero3 without
engine.ordered) the backend's own order decides, and only that differs.

The host waits for the device once a step, at its end, to read the loss and the norm. By then the
update has been started, and where the caller names the next step's batches and it comes from a
CUDA graph, that step too; a norm that is not finite has held the update back on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zpp_lab.codecs.errors import ErrorSums
from zpp_lab.codecs.numerics import clip_factor, fold_sum, total_norm
from zpp_lab.collectives.peer.choose import connect
from zpp_lab.collectives.plan import Bytes, Plan, StepUse, add_bytes, plans_by_step
from zpp_lab.collectives.transport import Transport, all_gather
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.cluster import CELL
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch, Batches, Engine, StepResult
from zpp_lab.engines.frozen import mark_all
from zpp_lab.engines.fsdp.base import FrozenBase, own_rows
from zpp_lab.engines.fsdp.graph import Launched, StepGraph, obstacle
from zpp_lab.engines.fsdp.kept import Kept
from zpp_lab.engines.fsdp.prefetch import InVain, Laps, Prefetch, Usage
from zpp_lab.engines.fsdp.resident import Brought, ByUnit, Masters, Resident, updates
from zpp_lab.engines.fsdp.rollout import all_agree, rolled_bytes, rolling, rollout_traffic
from zpp_lab.engines.fsdp.sent import Sent
from zpp_lab.engines.fsdp.state import EngineState
from zpp_lab.engines.fsdp.watch import RankWatch, merged_telemetry, refuse, telemetry_of_all
from zpp_lab.engines.fsdp.wrap import Wrapped, wrap
from zpp_lab.engines.optim import CompactAdamW
from zpp_lab.engines.optim.build import adamw, set_rate
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.parts import OwnPart, Regions, by_stage, cell_of
from zpp_lab.engines.rollout import Policy, captures, check_mark, eager
from zpp_lab.engines.units import ROOT, far_names, named_units, with_root
from zpp_lab.engines.watch import gathered_in_vain, unit_not_finite
from zpp_lab.models.cut import Parted
from zpp_lab.models.loss import counted, token_scores
from zpp_lab.models.objective import objective
from zpp_lab.models.start import Start, fill, materialize
from zpp_lab.runs.checkpoint.read import Ranks, Saved

if TYPE_CHECKING:
    from zpp_lab.engines.stages import OwnStages


class FsdpEngine(Engine):
    """Trains `model` as `plan` says; every rank of the default process group has one.

    `model` is whole on this rank's device, or on the meta device: then each rank makes its own
    shards of the initial weights. Its parameters become FSDP2's sharded ones. `transport`: one
    that is there already.
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
        building = Laps()
        self.cluster = plan.recipe.cluster
        self.transport = transport or self._connect()
        building.done("transport")
        # a rank whose files are damaged must not leave the others in a collective
        self.agreed = Ranks(shared=True).all
        self.rank = self.transport.rank
        self.shards = plan.recipe.shards
        self.part = self.rank % self.shards  # which shard of every parameter is this rank's
        self.plans = plans_by_step(plan, config)
        part = getattr(model, "part", 0)  # of the tensor parts
        stage = config.cluster.place(dist.get_rank())["pp"]
        self.owns = {first: each.stage(stage) for first, each in self.plans.items()}
        own = {first: each.cell(part) for first, each in self.owns.items()}
        self.base = FrozenBase(model, plan)
        self.residence = Residence.of(config)
        self.far = far_names(plan, self.residence)
        without_memory = any(p.is_meta for p in model.parameters())
        cut, far = config.train.masters == "split", self.far["masters"]
        self.masters = Masters(model, self.base.names, cut, self.shards, self.part, far)
        units = named_units(model, config.engine.blocks_per_unit)
        self.wrapped: Wrapped = wrap(
            model,
            units,
            own,
            self.transport,
            device,
            seed=config.seed,
            ordered=config.engine.ordered,
            offload=self.residence.offloads,
            ranks=cell_of(config.cluster, device),
        )
        self.parts: OwnPart | None = None
        if isinstance(model, Parted):
            clock, watchdog = self.wrapped.clock, self.transport.watchdog
            self.parts = OwnPart(model, self.owns[0], config.cluster, clock, watchdog)
        # no reduction overlaps the next where each one's gradients are used at once
        self.wrapped.under_way.open = not (self.residence.gradients or self.residence.by_unit)
        if self.residence.weights:
            gone = self.far["weights"] - self.base.names
            ids = {id(p): n for n, p in model.named_parameters() if n in gone}
            wrapped: Any = self.wrapped.by_name.values()
            self.masters.move_out(wrapped, ids, device)
        building.done("sharding")
        self.root = cast(FSDPModule, model)
        start = self._initialize() if without_memory else None
        rows = start.rows if start else None
        group = self.transport.group
        self.base.load(self.wrapped.installed, rows, self.part, device, self.agreed, group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the first step would wait for them
        building.done("weights")
        self.usage = Usage(with_root(model, units))
        self.graphs = captures(model, config.engine, device)
        self.prefetch = Prefetch(self.wrapped.by_name, ROOT, config.engine.prefetch)
        self.vain = InVain(plan.recipe.config.again)
        self.started: set[str] = set()  # units that have run at least once
        self.rolled: Bytes = {}  # of rollouts since the last step
        self.sent = Sent(self.wrapped, self.vain)
        self.clock, self.laps = self.wrapped.clock, Laps()
        self.memories = self.wrapped.memories
        names = self.base.names  # not ours to train, or to save
        self.parameters = {n: p for n, p in model.named_parameters() if n not in names}
        self.masters.keep(self.parameters)
        low, high = self.masters.low, self.masters.high
        self.kept = Kept(self.wrapped.installed, self.parameters, group, low)
        train = config.optimization
        self.optimizer = adamw(self.parameters, train, config.seed, self.far, low, high)
        self.resident = self._resident()
        split, regions = config.cluster.split, None
        if split:
            regions = Regions(config.cluster, plan, self.parameters, self.parts)
        self.state = EngineState(
            self.wrapped,
            self.parameters,
            self.masters,
            self.kept,
            self.optimizer,
            self.base,
            regions,
        )
        self.stages: OwnStages | None = None
        if plan.pipe is not None:
            from zpp_lab.engines.stages import OwnStages  # loads torch's pipelines

            self.stages = OwnStages(model, plan, config, self.wrapped)
        static = bool(getattr(model, "same_every_step", False))
        graph = config.engine.graph, obstacle(device, self.residence, static)
        ledger = self.parts.ledger if self.parts is not None else None
        self.graph = StepGraph(self._passes, self.wrapped, self.transport, *graph, ledger)
        self.launched: Launched | None = None  # the next step, if it is under way
        self.built = building.seconds

    def _resident(self) -> Resident:
        modules: Any = dict(self.wrapped.by_name)
        where = modules, self.parameters, self.owns[0], self.clock, self.device
        brought = None
        if self.masters.high:
            assert isinstance(self.optimizer, CompactAdamW)
            reads = {u.plan.unit.name: u.inside[0].reads for u in self.wrapped.installed}
            high = self.masters.high, self.optimizer
            brought = Brought(modules, self.parameters, *high, reads)
        if not self.residence.by_unit:
            late: Container[str] = self.parts.shared if self.parts is not None else {}
            if self.residence.offloads:  # torch brings gradients to the host later
                late = self.parameters
            far, waits = self.far["gradients"], self.residence.waits
            passing = set[str]().union(*self.far.values())
            return Resident(*where, far, waits, late, brought, passing)
        how: Any = {"clip": self.config.train.clip, "watched": self.transport.watched}
        return ByUnit(*where, brought, optimizer=self.optimizer, **how)

    def _connect(self) -> Transport:
        wanted = self.config.engine
        watchdog = Watchdog(wanted.timeout_seconds)
        ranks = self.config.cluster.members(CELL, dist.get_rank())
        return connect(self.cluster, watchdog, wanted.transport, self.device, ranks)

    def _initialize(self) -> Start | None:
        """Fill this rank's shards; returns where their rows came from."""
        materialize(self.model, "cpu" if self.residence.offloads else self.device)
        start: Start = self.model.start(self.config.seed)  # type: ignore[operator]
        rows = partial(own_rows, shards=self.shards, part=self.part)
        skip, put = self.base.names, self.masters.put
        self.agreed(lambda: fill(self.model, start, rows, local, skip, put))
        return start

    def enter(self, done: int) -> None:
        if self.wrapped.enter(done):
            self.plan, self.memories = self.plans[self.wrapped.phase], self.wrapped.memories
            if self.parts is not None:
                self.parts.follow(self.owns[self.wrapped.phase].parts)
            if self.stages is not None:
                self.stages.pipe.follow(self.plan.pipe)
            self.sent.settled = None
            self.graph.restart()

    def _start(self, done: int) -> None:
        """What nodes keep after `done` steps got there as the last of them sent it."""
        if self.kept.stale:
            self.enter(max(0, done - 1))
            self.kept.start(done)
            self.enter(done)

    def _alone(self) -> None:
        """Prepare for anything but a usual step: a graph's memory, and what its steps have left in
        it, is given back."""
        self.launched = None  # it has changed nothing that lasts
        self.settle()
        self.wrapped.reshard()
        self.graph.interrupt()

    # ------------------------------------------------------------------ one step

    def step(
        self,
        step: int,
        lr: float,
        batches: Batches,
        telemetry: bool,
        ahead: Batches | None = None,
    ) -> StepResult:
        watch = self._watch(step, errors=ErrorSums()) if telemetry else None
        laps = self.laps = Laps()
        self.enter(step)
        self._start(step)
        if isinstance(self.resident, ByUnit):
            self.resident.enter(step, lr)
        gradients = self._gradients(step, batches, watch)
        own, use, summed = gradients.made
        fell_back = self.wrapped.fallbacks.check(self.config.engine.allow_fallback)
        grads = self.resident.grads()
        if self.parts is not None:
            self.parts.add_shared(grads)
        sent = self.sent.count(self.wrapped.plan, use, frozenset(grads), as_planned=not fell_back)
        rolled, self.rolled = self.rolled, {}
        add_bytes(sent, rolled)
        if watch is None:
            self.graph.note(self.sent.settled)
        losses, norm = self._totals(own, grads, summed, gradients.odd)
        read = self._read(fold_sum(losses.flatten()) / losses.numel(), norm)
        laps.done("norm")
        self._update(step, lr, norm, sent, watch, grads)
        if ahead is not None and step + 1 not in self.plans and not self.memories.new:
            self.launched = self.graph.ahead(step + 1, partial(self._own, ahead))
        laps.done("update")
        loss, length = read()
        if not math.isfinite(length):
            self.launched = None
            self.resident.drop()
            if self.graph.misfit(gradients.odd):
                self.rolled = rolled
                return self.step(step, lr, batches, telemetry, ahead)
            if isinstance(self.resident, ByUnit):
                raise unit_not_finite(step, self.resident.norms)
            self._explain(step, batches)
        self.memories.commit(in_place=self.graph.step is not None)
        errors = None
        if watch and watch.errors:
            watch.errors.drop(gathered_in_vain(self.plan, use.passes))
            if self.stages is None:
                errors = merged_telemetry(watch.errors, self.device)
            else:
                errors = telemetry_of_all(watch.errors)
        if self.parts is not None:
            sent = self.parts.every(sent)
        if self.stages is not None:
            sent = self.stages.every(sent, self.owns[self.wrapped.phase], self.plan)
        self.enter(step + 1)
        laps.done("waiting")
        return StepResult(loss, length, sent, errors, laps.seconds)

    def _gradients(self, step: int, batches: Batches, watch: RankWatch | None) -> Launched:
        """Run forward and backward of every micro-step, or take the step that was launched ahead.
        `made`: this rank's losses, fp64 [micro-steps], what has been gathered and reduced, and the
        names of the gradients whose squares have been summed."""
        if watch is not None:
            self._alone()
            return Launched(step, self._passes(step, self._own(batches), watch))
        launched, self.launched = self.launched, None
        if launched is not None and launched.step == step:
            self.graph.put_back()
            return launched
        if not self.graph.ready or not self.memories.steady(step):
            return Launched(step, self.graph.eager(step, self._own(batches)))
        self.memories.start(step)
        return self.graph.replay(step, self._own(batches))

    def _own(self, batches: Batches) -> list[Batch]:
        """This rank's batches of a step."""
        return [batches(self.rank, micro) for micro in range(self.plan.micro_steps)]

    def _passes(
        self, step: int, batches: Sequence[Batch], watch: RankWatch | None = None
    ) -> tuple[Tensor, StepUse, frozenset[str]]:
        """Run them in this very call, on this rank's batches, one a micro-step; returns `made`."""
        self.wrapped.reshard()
        self.resident.start()
        self.memories.start(step)
        for unit in self.wrapped.installed:
            unit.start_step()
        if self.parts is not None:
            self.parts.ledger.start_step()
        micros = self.plan.micro_steps
        losses = torch.zeros(micros, dtype=torch.float64, device=self.device)
        passes = []
        self.vain.clear()
        self.wrapped.under_way.forget()
        self.clock.step, self.clock.grad, self.clock.master = step, True, False
        if self.stages is not None:
            losses = self.stages.run([self._on_device(b) for b in batches], self.plan, watch)
            self.laps.done("forward and backward")
            used = StepUse(self.plan.all_used().passes, self._reduced())
            return losses, used, self.resident.end()
        for micro in range(micros):
            last = micro == micros - 1
            self.clock.micro, self.clock.last = micro, last
            self.clock.observer = watch.at(micro) if watch else None
            self.root.set_reshard_after_backward(last or self.plan.recipe.config.again)
            reduces = last or not self.plan.accumulate_last
            losses[micro] = self._pass(batches[micro], reduces)
            passes.append(self.usage.taken())
        self.clock.observer = None
        return losses, StepUse(tuple(passes), self._reduced()), self.resident.end()

    def _pass(self, batch: Batch, reduces: bool) -> Tensor:
        """One forward and backward of this rank; the loss."""
        self.usage.start()
        loss = objective(self.model, self._on_device(batch), self.config.rl)
        self.resident.settle()
        self.laps.done("forward")
        if self.plan.gradients_wait or self.residence.by_unit:
            self.usage.taken().check_once(self.residence.by_unit)
        self.prefetch.before_backward(self.usage)
        self.started |= set(self.usage.order)
        for name, module in self.wrapped.by_name.items():
            # FSDP2 cannot keep a gradient back for a unit that has never run
            module.set_requires_gradient_sync(reduces or name not in self.started, recurse=False)
        (loss / self.plan.micro_steps).backward()
        if not reduces:
            for unit in self.wrapped.installed:
                unit.present.dtypes.keep()
        self.wrapped.under_way.join()
        self.laps.done("backward")
        self.vain.add(self.prefetch.wasted(self.usage), self.usage)
        self.prefetch.after_pass(self.usage)
        return loss.detach()

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type != "cuda" or batch[0].is_cuda:
            return batch
        return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in batch)

    def _reduced(self) -> Mapping[str, tuple[frozenset[str], ...]]:
        """Which parameters had a gradient in each reduction, by unit."""
        if self.wrapped.installed:
            units = self.wrapped.installed
            return {u.plan.unit.name: tuple(map(frozenset, u.present.taken)) for u in units}
        # an untouched FSDP2 does not say which, or how often
        absent = frozenset(self.parameters.keys() - self.resident.grads().keys())
        return self.plan.all_used(absent).reduced

    def _totals(
        self, losses: Tensor, grads: dict[str, Tensor], summed: frozenset[str], odd: str | None
    ) -> tuple[Tensor, Tensor]:
        """Losses fp64 [micro-steps, W], and the norm: alike on all ranks."""
        cluster, mine = self.config.cluster, self.parts.counted(grads) if self.parts else grads
        own = torch.cat((losses, self.resident.squares(mine, summed).view(1)))
        if odd:
            own.fill_(math.nan)  # so that no rank updates anything
        every = torch.empty(cluster.world, own.numel(), dtype=own.dtype, device=self.device)
        with self.transport.watched("losses and gradient norm (world)", self.device):
            all_gather(every.view(-1), own)
        stages = by_stage(every, cluster)
        norm = total_norm(stages[:, : cluster.tp * self.shards, -1].flatten())
        if self.shards < self.cluster.world:  # others have the same, unless one is not finite
            norm = norm + 0 * every[:, -1].sum()
        return stages[-1, :: cluster.tp, :-1].t().contiguous(), norm

    def _read(self, *scalars: Tensor) -> Callable[[], list[float]]:
        """Start to copy scalars; returns the step's one wait for the device, for when everything
        has been started."""
        found, copied = torch.stack(scalars), None
        if found.is_cuda:
            found = torch.empty_like(found, device="cpu", pin_memory=True).copy_(
                found, non_blocking=True
            )
            copied = torch.cuda.Event()
            copied.record()

        def read() -> list[float]:
            with self.transport.watched("the end of the step", torch.device("cpu")):
                if copied is not None:
                    copied.synchronize()
                values: list[float] = found.tolist()
            return values

        return read

    def _update(
        self,
        step: int,
        lr: float,
        norm: Tensor,
        sent: Bytes,
        watch: RankWatch | None,
        grads: Mapping[str, Tensor],
    ) -> None:
        """Clip and update, or change nothing when the norm is not finite; the device decides. Where
        nodes keep weights, each unit's are sent right after its update; `sent` counts them."""
        if self.residence.by_unit:
            return  # each unit has been updated
        clip, ok = self.config.train.clip, torch.isfinite(norm)
        factor = clip_factor(norm, clip) if clip else None
        set_rate(self.optimizer, lr)
        self.kept.wait()
        waits = self.residence.waits
        whole = self.residence.passes and not waits
        update = updates(self.optimizer, self.parameters, step, factor, ok, grads, whole)
        self.kept.send(step + 1, ok, sent, watch, update)
        if waits:
            self.resident.defer(update)
        else:
            update(self.parameters)

    def _watch(self, step: int, **how: Any) -> RankWatch:
        """Make what looks at this rank's wires in a step."""
        if self.config.cluster.split:
            how["cell"] = self.config.cluster.members(CELL, dist.get_rank())
        return RankWatch(step, self.rank, **how)

    def settle(self) -> None:
        """Finish the last step's update, before anything but another step looks at the state. No
        stream keeps the host from reading and writing what lies in host memory: it waits."""
        self.resident.settle()
        if self.device.type == "cuda" and self.residence.passes:
            torch.cuda.synchronize(self.device)
        self.resident.forget()

    def _explain(self, step: int, batches: Batches) -> None:
        """The step is a pure function of the state: run it again and look at every value. No rank
        may stop half-way, so findings are collected and compared at the end."""
        self.optimizer.zero_grad(set_to_none=True)
        names = list(self.parameters)
        if self.stages is not None:
            names = [p.name for unit in self.plan.units for p in unit.unit.parameters]
        order = {name: i for i, name in enumerate(names)}
        watch = self._watch(step, order=order, check=True)
        self._gradients(step, batches, watch)
        watch.means({} if self.wrapped.installed else self.resident.grads())
        self.optimizer.zero_grad(set_to_none=True)
        refuse(watch)

    # ------------------------------------------------------------------ the rest

    @contextmanager
    def rollout(
        self, step: int, gather: str = "rollout", counted: bool = True, wire: bool = True
    ) -> Iterator[Policy]:
        whole = gather != "token"
        self._alone()
        self.enter(step)
        self._start(step)
        marked, before = self._mark(), rollout_traffic(self.wrapped)
        self.clock.step, self.clock.master = step, not wire
        agree = all_agree(self.transport, self.device)
        graphs = self.graphs if whole else None
        policy = Policy(self.model, [self.rank], agree, partial(self._rolled_on, whole), graphs)
        self.model.eval()
        self.usage.start()
        try:
            with (
                eager(self.config.engine.compile),
                torch.no_grad(),
                rolling(self.wrapped, whole, wire),
            ):
                yield policy
        finally:
            policy.open, self.clock.master = False, False
            self.model.train()
        self.agreed(lambda: check_mark(marked, self._mark()))
        passes = None if whole else policy.passes
        sent = rolled_bytes(self.wrapped, passes, before) if wire else {}
        if counted:
            add_bytes(self.rolled, sent)

    def _rolled_on(self, whole: bool) -> None:
        """A pass is done: drop what was gathered in vain, and the root's weights."""
        self.prefetch.settle(self.usage)
        self.usage.start()
        if not whole and self.plan.recipe.config.again:
            self.root.reshard()

    def _mark(self) -> Tensor:
        return mark_all([local(p) for p in self.parameters.values()], self.device)

    @torch.no_grad()
    def token_scores(self, step: int, batches: Iterable[Batch], wire: bool) -> Tensor:
        """Ranks take the batches in turn; all of them join every gather and get all scores."""
        todo, world = list(batches), self.cluster.world
        self._alone()
        self.enter(step)
        self._start(step)
        self.clock.step, self.clock.grad, self.clock.master = step, False, not wire
        self.clock.observer = None
        self.model.eval()
        rounds, sizes = -(-len(todo) // world), [counted(batch[1]) for batch in todo]
        own = torch.zeros(rounds, 2, max(sizes), dtype=torch.float32, device=self.device)
        for i in range(rounds):
            batch = todo[min(i * world + self.rank, len(todo) - 1)]
            self.usage.start()
            there = self._on_device(batch[:2])
            with self.parts.uncounted() if self.parts else nullcontext():
                if self.stages is not None:
                    scores = self.stages.scores(there)
                else:
                    scores = token_scores(self.model, *there)
            self.prefetch.settle(self.usage)
            own[i, :, : scores.shape[1]] = scores
        self.model.train()
        self.wrapped.reshard()
        self.clock.master = False
        cluster = self.config.cluster  # of which the last stage has them
        every = torch.empty(cluster.world, *own.shape, dtype=own.dtype, device=self.device)
        with self.transport.watched("held-out losses (world)", self.device):
            all_gather(every.view(-1), own.view(-1))
        every = by_stage(every, cluster)[-1, :: cluster.tp]
        in_order = every.transpose(0, 1).flatten(0, 1).cpu()
        return torch.cat([row[:, :size] for row, size in zip(in_order, sizes, strict=False)], 1)

    def state_dict(self) -> dict[str, Any]:
        """Sharded weights (DTensors), and the optimizer's state, both by parameter name."""
        self.settle()
        return self.state.save()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sharded or whole tensors by name, of this model on any cluster. ValueError when they are
        another model's."""
        self._alone()
        self.state.load(state, self.device)

    def load_checkpoint(self, saved: Saved, memories: Iterable[str] | None = None) -> int:
        """Read this rank's part of a checkpoint that any cluster wrote; returns its step. Every
        rank calls it. `memories`: which of the saved ones to take, by WIRE.PARAMETER; None: all.

        ValueError when the checkpoint is another model's, or keeps optimizer states otherwise;
        DamagedError, half-way, when some rank's part is not what was written. Both on all ranks:
        they agree after reading, and nothing is exchanged before, so no rank waits for one that
        found damage. Another checkpoint can be loaded then.
        """
        self._alone()
        self.agreed(lambda: self.state.make_room(saved, memories, self.device))
        self.state.read(saved, self.agreed)
        return saved.step
