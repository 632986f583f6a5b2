"""One cell of the virtual engine: a data-parallel cluster's share of the model, all of its ranks.

Masters, optimizer, what gathers encode, residuals, reductions and the ledger. Passes stay with the
engine, which says what they used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs import Noise, kernels
from zpp_lab.codecs.planes import joined, settle
from zpp_lab.collectives.context import Memories
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import PassUse, Plan, StepUse
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.residence import Plane, Residence
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, UPDATE, WIRES, Wire
from zpp_lab.engines.frozen import Marks, check_marks, decode_shards, encode_shards, mark, mark_all
from zpp_lab.engines.norm import rank_squares
from zpp_lab.engines.optim.build import (
    adamw,
    load_optimizer_state,
    optimizer_state,
    set_rate,
    update,
)
from zpp_lab.engines.units import far_names
from zpp_lab.engines.virtual.passes import Grads
from zpp_lab.engines.virtual.reduction import Reduction, together
from zpp_lab.engines.watch import Watch


class Cell:
    """Gathers, reduces and updates `weights` (fp32, on their device). They become the gathered
    weights in `param_dtype`; the fp32 master weights are separate. `plans`: by how many steps are
    done when each begins."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], plans: Mapping[int, Plan], config: Config
    ) -> None:
        self.weights, self.plans, self.config = dict(weights), plans, config
        plan = self.plan = plans[0]
        self.cluster = plan.recipe.cluster
        self.ledger = Ledger()
        self.device = next(iter(self.weights.values())).device
        self.marks = self._store_base()
        live = {n: p for n, p in self.weights.items() if n not in self.marks}
        self.master = {n: nn.Parameter(p.detach().clone()) for n, p in live.items()}
        self.split = config.train.masters == "split"
        self._settle()
        for name, p in live.items():
            self.master[name].requires_grad_(p.requires_grad)
            p.data = p.data.to(DTYPES[config.train.param_dtype])
        far: dict[Plane, frozenset[str]] = {}
        far["moments"] = far_names(plan, Residence.of(config))["moments"]
        self.optimizer = adamw(self.master, config.optimization, config.seed, far)
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

    def enter(self, done: int) -> bool:
        """Follow the plan of the step after `done` steps; returns whether backward's own weights
        lie elsewhere now."""
        plan = self._plan_at(done)
        if plan is self.plan:
            return False
        self.plan, before = plan, self.memories
        self.memories = self._memories()
        self.memories.go_on(before)
        return self._follow()

    def _plan_at(self, done: int) -> Plan:
        """Return the plan of the step after `done` steps."""
        return self.plans[max(first for first in self.plans if first <= done)]

    def _follow(self) -> bool:
        """Allocate what every step under this plan writes, at places that stay; returns whether
        others than before are written."""
        own = [s.name for u in self.plan.units if u.own_backward for s in u.live(BACKWARD).segments]
        self.reductions = [
            Reduction(unit, self.device, self.ledger, self.memories)
            for unit in together(self.plan.units)
        ]
        if own == self.own:
            return False  # what was captured reads and writes at the same places
        self.own = own
        self.forward = {n: torch.empty_like(self.weights[n]).detach() for n in own}
        self.backward = {n: torch.empty_like(self.weights[n]).detach() for n in own}
        return True

    # ------------------------------------------------------------------ gradients

    def mean(self, total: Grads, dtype: torch.dtype) -> None:
        """End the reductions, and add the mean gradients, fp32 and whole, to `total`."""
        for reduction in self.reductions:
            for name, rows in reduction.mean(dtype).items():
                own = self.master[name]
                mean = rows.flatten()[: own.numel()].view(own.shape)  # without padding
                mean = self._kept_as(mean)
                total[name] = self._kept_as(total[name] + mean) if name in total else mean

    def squares(self, grads: Grads) -> Tensor:
        """Return each rank's sum of squares, fp64 [shards]."""
        return rank_squares(grads, self.plan, self.device)

    def update(self, grads: Grads, lr: float, step: int) -> None:
        """Update the masters."""
        set_rate(self.optimizer, lr)
        for name, p in self.master.items():
            p.grad = grads.get(name)
        update(self.optimizer, step)
        self._settle()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _settle(self) -> None:
        """Give masters the values that two planes hold, where real ranks keep them so."""
        for p in self.master.values() if self.split else ():
            settle(p.data)

    def _kept_as(self, gradient: Tensor) -> Tensor:
        """Round a gradient to the dtype in which real ranks keep it."""
        return gradient.to(torch.bfloat16).to(gradient.dtype) if self.split else gradient

    def check_bytes(self, passes: tuple[PassUse, ...], reduced: Sequence[frozenset[str]]) -> None:
        """Count what a real run of this step sends besides reductions, which have counted theirs;
        then compare all bytes with the plan. `reduced`: who had a gradient in each reduction."""
        names = [u.unit.name for u in self.plan.units]
        use = StepUse(passes, dict.fromkeys(names, tuple(reduced)))
        for leg in (leg for unit in self.plan.units for leg in unit.legs(use)):
            if WIRES[leg.wire].pattern != "hop":
                self.ledger.add(leg.wire, leg.traffic * leg.times)
        self.ledger.check(self.plan.step_bytes(use))

    # ------------------------------------------------------------------ weights

    def gather(
        self, step: int, wire: Wire, into: Mapping[str, Tensor], watch: Watch | None = None
    ) -> None:
        """Gather the parameters that `into` holds, as `wire` brings them."""
        watch = watch or Watch()
        world = self.plan.recipe.shards
        noise = Noise.of_owners(self.config.seed, step, wire, range(world))
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

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Put these values in the place of the gathered weights, unseen by autograd."""
        if values:
            into = [self.weights[name].data for name in values]
            torch._foreach_copy_(into, list(values.values()))

    def load_masters(self) -> None:
        """Put the master weights, rounded, in the place of the gathered ones."""
        self.load_weights({n: p.detach() for n, p in self.master.items()})

    def start(self, done: int) -> None:
        """Replicate the weights after `done` steps at the start, and after loading a state."""
        if not self.stale:
            return
        self.stale = False
        self._round_sources()
        if not self.plan.recipe.differences:
            self.keep(done)

    @torch.no_grad()
    def keep(self, done: int, watch: Watch | None = None) -> None:
        """Send the new weights between nodes after `done` steps, under the last step's plan."""
        watch, ranks = watch or Watch(), range(self.cluster.world)
        noise = Noise.of_owners(self.config.seed, done, UPDATE, ranks)
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

    # ------------------------------------------------------------------ state

    def mark(self) -> Tensor:
        """Return a digest of the masters' bits."""
        return mark_all(list(self.master.values()), self.device)

    def state(self) -> dict[str, Any]:
        """Return weights, optimizer, residuals and what nodes keep, by parameter name."""
        return {
            "weights": {n: p.detach() for n, p in self.master.items()},
            "optimizer": optimizer_state(self.optimizer, self.master),
            **({"base": self.marks} if self.marks else {}),
            **({"kept": self._remembered()} if self.plan.recipe.differences else {}),
            **({"memory": self.memories.state()} if self.memories.old else {}),
        }

    def _remembered(self) -> dict[str, Tensor]:
        """Return replicas of parameters that travel as differences: they are state."""
        self.start(0)
        return {name: self.sources[name] for unit in self.plan.units for name in unit.remembered}

    def load(self, state: dict[str, Any]) -> None:
        """Take what `state` gave. ValueError where it is another model's."""
        missing = sorted(set(self.master) ^ set(state["weights"]))
        if missing:
            raise ValueError(f"the checkpoint is of another model; {missing[0]} differs")
        check_marks(self.marks, state.get("base", {}))
        with torch.no_grad():
            low = state.get("low", {})
            for name, p in self.master.items():
                value = state["weights"][name]
                p.copy_(joined(value, low[name]) if name in low else value)
        self._settle()
        remembered = state.get("memory", {})
        for name, tensor in self.memories.make(remembered, self.device).items():
            tensor.copy_(remembered[name])
        load_optimizer_state(self.optimizer, self.master, state["optimizer"])
        self.stale, kept = self.plan.recipe.kept, state.get("kept", {})
        if self.plan.recipe.differences and kept:
            self.start(0)
            for name, value in self._remembered().items():
                if name in kept:  # another recipe's state may lack it: then the master, rounded
                    value.copy_(kept[name])
