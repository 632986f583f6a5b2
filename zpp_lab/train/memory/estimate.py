"""What each rank of a real run will hold, by formula, before anything is allocated.

Every item is counted at the moments of `buffers.py`; the peak is the largest sum. Rank 0 is
counted, which never has less than others: the last shards may be shorter. Units follow what FSDP2
and `collectives/` keep alive: the gathered weights of the unit that computes, one payload for each
unit gathered ahead, a reduction's input (FSDP2's buffer, or the gradients that ours were encoded
from) until the next one begins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container
from dataclasses import replace
from typing import Literal

from zpp_lab.codecs.errors import AT_ONCE
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.pipe import PipePlan
from zpp_lab.collectives.plan import Plan, Unit, UnitPlan
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.engines.norm import square_bytes
from zpp_lab.engines.optim import BATCH, SCRATCH, SPLITTING, StateKind
from zpp_lab.engines.optim.host import BEHIND, STREAMS, pinned_state_bytes
from zpp_lab.engines.units import ROOT, far_names, is_untouched
from zpp_lab.models.generate import is_captured
from zpp_lab.models.lora import A as LORA_A
from zpp_lab.models.loss import heldout_size
from zpp_lab.train.memory.activations import FP32, Activations, Slices, cached_width
from zpp_lab.train.memory.buffers import (
    GIB,
    MOMENTS,
    NOT_EVALUATED,
    Buffers,
    Estimate,
    Item,
    Moment,
    always,
    kernels_serve,
    moments,
)
from zpp_lab.train.memory.shards import (
    HALF,
    HALVES,
    optimizer_bytes,
    passing_bytes,
    pinned_shard_bytes,
    shard_bytes,
    shard_shape,
    stage_bytes,
)
from zpp_lab.train.memory.trace import TracedActivations

Acts = Activations | TracedActivations

CONTEXT = GIB  # assumed: a process's CUDA context, kernels, library workspaces
NCCL = GIB // 2  # assumed: buffers of the process groups of one rank
SAMPLED = 48  # bytes a logit while a token is drawn: words of Philox, noise and scores in fp64
# bytes while telemetry adds up a part: nine fp64 an element, and the partial sums
SUMMING = 80 * AT_ONCE


def estimate(plan: Plan, config: Config, vocab: int) -> Estimate:
    """Estimate what each rank of `plan`'s cluster holds on engine=fsdp with one GPU a rank; of
    stages, those of the one that needs most. ValueError for a model of transformers whose code does
    not run on shapes alone."""
    if plan.pipe is not None:
        places = range(plan.pipe.ranks)
        return max((_of_stage(plan, config, vocab, p) for p in places), key=lambda e: e.peak)
    return _of_rank(plan, config, vocab)


def _of_stage(plan: Plan, config: Config, vocab: int, place: int) -> Estimate:
    """Estimate ranks of this place in a pipeline: as a model of their blocks alone, with what more
    micro-steps keep. Weights stay to a step's end."""
    own, pipe, chunks = with_root(plan.stage(place)), plan.pipe, config.engine.chunks
    assert pipe is not None
    layers, last = sum(u.unit.blocks for u in own.units), place == pipe.ranks - 1
    config = replace(config, model=replace(config.model, layers=layers))
    found = _of_rank(own, config, vocab if last else 0)
    kept = found.item("activations").nbytes["loss"]
    passes = passes_under_way(config, pipe.ranks, place)
    more = max(0, kept * passes // chunks - kept)
    weights = found.item("gathered weights").nbytes
    left: tuple[Moment, ...] = "early sent", "late sent", "root"
    held = {m: weights["loss"] - weights[m] for m in left}
    return Estimate(
        (
            *found.items,
            Item("activations of other micro-steps", always(more) | NOT_EVALUATED | {"update": 0}),
            Item("gathered weights, to the end of a step", moments() | held),
            Item("payloads of stages", always(payload_bytes(config, pipe, place))),
        )
    )


def with_root(own: Plan) -> Plan:
    """Return a stage's plan with an empty root unit where it has neither embedding nor head."""
    if own.units[-1].unit.name == ROOT:
        return own
    root = Unit(ROOT, (), frozenset(), reshard=False, blocks=0)
    return replace(own, units=(*own.units, replace(own.units[0], unit=root)))


def passes_under_way(config: Config, ranks: int, place: int) -> int:
    """Count the forwards of a rank's stages whose backward is to come, at most, as schedules order
    them."""
    micros, chunks = config.train.micro_steps, config.engine.chunks
    if config.engine.schedule == "gpipe":
        return micros
    if config.engine.schedule == "1f1b_overlap":
        return min(micros, max(1, 4 * (ranks - 1 - place)))
    if chunks == 1:
        return min(micros, ranks - place)
    each = micros // max(1, micros // ranks)  # of a round
    return min(micros * chunks, (chunks - 1) * each + 2 * (ranks - 1 - place) + 1)


def payload_bytes(config: Config, pipe: PipePlan, place: int) -> int:
    """Count the bytes of payloads that a rank holds at most. torch has a buffer for each one that a
    step receives. 1f1b_overlap has those of micro-steps under way, and of two ticks' transfers."""
    if config.engine.schedule != "1f1b_overlap":
        return sum(pipe.own(place))
    micros, last = config.train.micro_steps, pipe.ranks - 1 - place
    sent, received = (min(micros, n) for n in (4 * last, 4 * last + 2))  # activations
    count = (received + min(micros, 2)) * (place > 0) + (sent + min(micros, 2)) * (last > 0)
    return count * pipe.layout.nbytes


def _of_rank(plan: Plan, config: Config, vocab: int) -> Estimate:
    shape, held_out = (config.train.batch_size, config.data.seq_len), heldout_shape(config)
    acts = _activations(plan, config, vocab, shape, Slices.of(plan, math.prod(shape)))
    uncoded = Slices.of(plan, math.prod(held_out), coded=False)
    holder = _Rank(plan, config, acts, _activations(plan, config, vocab, held_out, uncoded))
    items = [*holder.state(), *holder.wires(), *holder.compute(), *holder.constants()]
    if plan.rollouts:
        items.append(Item("rollout", holder.rollout(vocab)))
        items.append(Item("rollout's CUDA graph", always(holder.captured(vocab)), outside=True))
    if config.rl.learned:
        from zpp_lab.train.rl.learned import held_bytes  # with what reads checkpoints

        items.append(Item("reward model of rank 0", always(held_bytes(config))))
    return Estimate(tuple(i for i in items if i.most))


def heldout_shape(config: Config) -> tuple[int, int]:
    """Return the sequences of a held-out batch and the tokens of each."""
    length = config.data.seq_len
    return min(heldout_size(length), max(1, config.train.eval_tokens // length)), length


def _activations(
    plan: Plan, config: Config, vocab: int, shape: tuple[int, int], slices: Slices
) -> Acts:
    """Count activations of a batch of `shape`: sequences and tokens each."""
    if config.model.name == "hf":
        dtype, layers = plan.recipe.weights_dtype, sum(u.unit.blocks for u in plan.units)
        return TracedActivations.of(config.model, vocab, shape, dtype, layers, slices)
    tokens = math.prod(shape) // slices.tp
    acts = replace(Activations.of(config, vocab), tokens=tokens, slices=slices)
    if plan.stored:
        blocks = [u.unit for u in plan.units[:-1]]
        ranks = [sum(p.shape[0] for p in u.parameters if p.name.endswith(LORA_A)) for u in blocks]
        # elements a token between the two adapters of every layer, for the largest block
        adapters = max(r // u.blocks for r, u in zip(ranks, blocks, strict=True))
        acts = replace(acts, adapters=adapters, head_trained=False)
    return acts


def saved_bytes(every: list[Parameter], trained: list[Parameter], config: Config) -> int:
    """Return rank 0's part of a checkpoint, before weights alone are rounded to bf16."""
    if config.train.checkpoint_weights_only:
        return shard_bytes(every)
    return shard_bytes(every) + optimizer_bytes(trained, config.train.optimizer_state)


def secondary_bytes(plan: Plan) -> int:
    """Return hpZ's bytes: of every unit that is gathered again, one forward row a node."""
    rows = sum(u.forward.nbytes for u in plan.units if u.keeps_secondary)
    return plan.recipe.cluster.nodes * rows


class _Rank:
    """Items of one rank, in groups."""

    def __init__(self, plan: Plan, config: Config, acts: Acts, heldout: Acts) -> None:
        self.plan, self.config, self.acts, self.heldout = plan, config, acts, heldout
        recipe, self.residence = plan.recipe, Residence.of(config)
        self.weight, self.grad = recipe.weights_dtype.itemsize, recipe.grads_dtype.itemsize
        self.planes = config.train.masters == "split"
        self.far = far_names(plan, self.residence)
        self.untouched = is_untouched(plan, config.engine.ordered)
        self.buffers, self.kernels = Buffers(plan, config), kernels_serve(config)
        self.root = plan.units[-1]
        self.units = plan.units[:-1]
        self.unit = max(self.units, key=_numel)
        # units that went back before the one at 'early': 1 where a reduction's input and sums
        # exceed a unit's activations
        left = 0 if self.plan.reductions > 1 else shard_bytes(_trained(self.unit))
        self.early = int(
            len(self.units) > 1
            and self._held(self.unit) + left > self.unit.unit.blocks * self.acts.between
        )

    def _left(self, gone: int) -> int:
        """Count the model's blocks that have not gone back when so many units have."""
        return sum(u.unit.blocks for u in self.units[: max(0, len(self.units) - gone)])

    # ------------------------------------------------------------------ what stays

    def state(self) -> list[Item]:
        every = [p for u in self.plan.units for p in u.unit.parameters if not _stored(u, p)]
        trained = [p for u in self.plan.units for p in _trained(u)]
        place: Literal["gpu", "host"] = "host" if self.residence.offloads else "gpu"
        masters, grads = ("bf16 and rest", "bf16") if self.planes else ("fp32", "fp32")
        low, high = ([p for p in every if p.name in self.far[plane]] for plane in HALVES)
        near = shard_bytes(every) - shard_bytes([*low, *high], HALF)
        return [
            Item(f"master weights, {masters}", always(near), place),
            Item("master weights, low planes", always(pinned_shard_bytes(low, HALF)), "host"),
            Item("master weights, high planes", always(pinned_shard_bytes(high, HALF)), "host"),
            Item("high planes, for gathers", always(self._brought({p.name for p in high}))),
            Item("frozen base, encoded", always(sum(u.stored.nbytes for u in self.plan.units))),
            *self._moments(trained, self.config.train.optimizer_state, place),
            *self._transfers(trained),
            *self._gradients(f"gradients, {grads}", place),
            Item("checkpoint, being written", always(self._checkpoint(every, trained)), "host"),
            Item("node-replicated weights", always(self._kept())),
            Item("error-feedback residuals", always(self.plan.memory_bytes)),
            Item("error-feedback residuals, this step's", self._remembering()),
            Item("gradient sums in the node", self._node_sums()),
            Item("secondary partition", always(secondary_bytes(self.plan)) | NOT_EVALUATED),
        ]

    def _brought(self, names: Container[str]) -> int:
        """Count the high planes of units gathered ahead, and of those just read."""
        count = BEHIND + max(1, self.config.engine.prefetch)
        units = ([p for p in u.unit.parameters if p.name in names] for u in self.plan.units)
        return sum(sorted(shard_bytes(own, HALF) for own in units)[-count:])

    def _kept(self) -> int:
        """Count node-replicated weights: of every parameter one shard a node, as it is gathered."""
        recipe = self.plan.recipe
        every = [p for u in self.plan.units for p in u.unit.parameters]
        return recipe.cluster.nodes * shard_bytes(every, self.weight) if recipe.kept else 0

    def _node_sums(self) -> dict[Moment, int]:
        """Count sums of earlier micro-steps, in fp32, until the last one sends them."""
        recipe = self.plan.recipe
        if not recipe.node_sums or self.plan.reductions == 1:
            return moments()
        rows = recipe.cut // recipe.cluster.gpus_per_node
        every = FP32 * rows * sum(u.hops[0].coded_numel for u in self.plan.units)
        return always(every) | NOT_EVALUATED | {"update": 0}

    def _remembering(self) -> dict[Moment, int]:
        """Count the new residuals of the units that are reduced already, until the step is done."""
        if self.plan.reductions > 1:  # earlier micro-steps have left all of them
            return always(self.plan.memory_bytes) | NOT_EVALUATED
        every, block, root = (
            sum(m.nbytes for u in units for m in u.memories.values())
            for units in (self.plan.units, [self.unit], [self.root])
        )
        end = every - root
        sent: dict[Moment, int] = {"early sent": (self.early + 1) * block, "late sent": end}
        late = max(0, end - block)
        return moments(early=self.early * block, late=late, root=every, update=every) | sent

    def _encoding(self, unit: UnitPlan) -> int:
        """Count what residuals need while a unit is encoded: at a first hop its input, at a second
        one sums, input and what that decodes to; and stacks of parameters."""
        found = []
        for wire in self.plan.recipe.hops:
            same: Counter[tuple[Memory, int]] = Counter()
            for (where, _), m in unit.memories.items():
                if where == wire:
                    same[m.memory, m.numel] += m.rows * m.numel
            wholes = 1 if wire == self.plan.recipe.hops[0] else 3
            found.append(FP32 * (wholes * same.total() + 4 * max(same.values(), default=0)))
        return max(found)

    def _remembered(self) -> int:
        """Count this rank's part of the node-replicated weights in a checkpoint."""
        names = {n for u in self.plan.units for n in u.remembered}
        every = (p for u in self.plan.units for p in u.unit.parameters if p.name in names)
        return shard_bytes(every, self.weight)

    def _updates(self) -> list[Item]:
        """Count a unit's new weights in transfer, whose memory torch reserves for their stream."""
        units = self.plan.units if self.plan.recipe.kept else ()
        most = max(map(self._update, units), default=0)
        travelling = sorted(map(self.buffers.update, units))[-2:]
        most += travelling[0] if len(travelling) > 1 else 0  # beside the largest one
        return [
            Item("new weights, in transfer", moments(update=most)),
            Item("new weights, their stream's", always(most) | {"update": 0}, outside=True),
        ]

    def _update(self, unit: UnitPlan) -> int:
        """Count a unit's payloads and torch's temporaries: what is encoded from masters where
        telemetry looks or no kernel serves; without kernels also what stacked parameters decode to,
        the result and the choice of either; masters of host memory or in two planes."""
        recipe, segments = self.plan.recipe, unit.update.segments
        numel = sum(s.numel for s in segments)
        most = self.buffers.update(unit)
        if not self.kernels or self.config.tracking.telemetry_every:
            most += (FP32 if recipe.differences else self.weight) * numel
        if not self.kernels:
            groups = [sum(segments[i].numel for i in group) for group in unit.update.groups]
            most += 3 * FP32 * recipe.cluster.nodes * max(groups, default=0)
        return most + (FP32 * numel if self.residence.offloads or self.planes else 0)

    def _moments(
        self, trained: list[Parameter], kind: StateKind, place: Literal["gpu", "host"]
    ) -> list[Item]:
        """Count AdamW's moments."""
        near = [p for p in trained if p.name not in self.far["moments"]]
        gone = [p for p in trained if p.name in self.far["moments"]]
        pinned = sum(pinned_state_bytes(shard_shape(p), kind) for p in gone)
        name = f"optimizer state, {kind}"
        return [
            Item(name, always(optimizer_bytes(near, kind)), place),
            Item(f"{name}, rest" if near else name, always(pinned), "host"),
        ]

    def _transfers(self, trained: list[Parameter]) -> list[Item]:
        """Count what passes the GPU from host memory, a stage in each stream. Where units are
        updated beside the forward, the streams keep theirs."""
        nbytes = sum(passing_bytes(p, self.config, self.far)[0] for p in trained)
        stage = stage_bytes(trained, self.config, self.far)
        first = min(stage, nbytes)
        # the host frees a stage before it fills the next one: torch counts one at a time
        second = min((STREAMS - 1) * stage, nbytes - first)
        if self.residence.waits or self.residence.by_unit:
            return [Item("state in transfer", always(first + second), outside=True)]
        return [
            Item("optimizer state, in transfer", moments(update=first)),
            Item("optimizer state, second stream", moments(update=second), outside=True),
        ]

    def _checkpoint(self, every: list[Parameter], trained: list[Parameter]) -> int:
        """Count host memory: a copy of what is small enough, and buffers for the disk."""
        train = self.config.train
        if not (train.checkpoint_every or train.keep_checkpoints):
            return 0
        saved = saved_bytes(every, trained, self.config)
        if not train.checkpoint_weights_only:
            saved += self._remembered() + self.plan.memory_bytes
        copied = saved if saved <= train.checkpoint_host_gib * GIB else 0
        written = saved // 2 if train.checkpoint_weights_only else saved  # in bf16
        return copied + min(written, train.checkpoint_staging_mib * 2**20)

    def _gradients(self, name: str, place: Literal["gpu", "host"]) -> list[Item]:
        """Count this rank's gradients of reduced units: those that stay, those that leave, and of
        these a unit's that are on their way. A unit's come with its reduction."""
        each, far = HALF if self.planes else FP32, self.far["gradients"]
        trained = [(u, [p for p in _trained(u) if p.name not in far]) for u in self.plan.units]
        gone = [p for u in self.plan.units for p in _trained(u) if p.name in far]
        every = shard_bytes((p for _, own in trained for p in own), each)
        if self.plan.reductions > 1:  # earlier micro-steps have left theirs
            near = always(every) | NOT_EVALUATED
        else:
            own = {id(u): shard_bytes(ps, each) for u, ps in trained}
            root, block, last = (own[id(u)] for u in (self.root, self.unit, self.units[-1]))
            late, end = max(0, every - root - block), every - root
            near = moments(early=self.early * last, late=late, root=end, update=every)
            if self.residence.by_unit:  # one that is updated, and one that lands
                both = block + max(block, root)
                near = moments(early=self.early * last, late=2 * block, root=both)
        units = ([p for p in _trained(u) if p.name in far] for u in self.plan.units)
        leaving = max(shard_bytes(ps, each) for ps in units)
        return [
            Item(name, near, place),
            Item(f"{name}, in host memory", always(pinned_shard_bytes(gone, each)), "host"),
            Item("gradients, leaving", always(leaving) | NOT_EVALUATED | {"update": 0}),
        ]

    # ------------------------------------------------------------------ what a unit needs

    def wires(self) -> list[Item]:
        return [
            Item("gathered weights", self._gathered()),
            Item("gather buffers", self._payloads()),
            Item("whole gradients", self._whole_gradients()),
            Item("reduction buffers", self._reductions()),
            Item("telemetry", self._telemetry()),
            *self._updates(),
            Item("peer-memory slots", always(self.buffers.slots()), outside=True),
        ]

    def _gathered(self) -> dict[Moment, int]:
        """Count the root's weights until its own reduction, and the computing unit's until then."""
        root, block = self.weight * _numel(self.root), self.weight * _numel(self.unit)
        found = moments(loss=root, early=root + block, late=root + block)
        found |= {"early sent": root, "late sent": root}
        found |= {"eval": root + block, "eval loss": root}
        if not self.plan.recipe.config.again:
            every = root + self.weight * sum(map(_numel, self.units))
            found |= {"eval": every, "eval loss": every, "loss": every, "early": every}
            found["early sent"] = every - block
            if self.plan.micro_steps > 1:  # they stay until the last one's backward
                found |= {"early sent": every, "late": every, "late sent": every}
        return found

    def _payloads(self) -> dict[Moment, int]:
        """Count the units gathered ahead in backward; in a forward the computing one too."""
        count = max(1, self.config.engine.prefetch)
        held = min(1 + self.config.engine.prefetch, len(self.units))
        found = moments() | {"eval": max(self.buffers.heldout(u, held) for u in self.units)}
        if not self.plan.recipe.config.again:
            return found
        first, ahead = (
            max(self.buffers.gathers(u, min(count, len(self.units) - gone)) for u in self.units)
            for gone in (0, 1 + self.early)
        )
        return moments(loss=first, early=ahead) | {"eval": found["eval"]}

    def _whole_gradients(self) -> dict[Moment, int]:
        """Count the head's gradient from the loss on, a unit's while it is reduced (before, it
        counts as backward), and the root's; with one reduction a step every unit's, in
        reduce_dtype."""
        head = self.weight * self.acts.head
        root, block = self.weight * _to_train(self.root), self.weight * _to_train(self.unit)
        found = moments(early=head, late=head, root=root)
        found |= {"early sent": head + block, "late sent": head + block}
        if self.acts.tied:
            found["root"] += head  # the embedding's part, before the two are added
        if self.plan.gradients_wait:
            root, block = self.grad * _to_train(self.root), self.grad * _to_train(self.unit)
            every = root + self.grad * sum(map(_to_train, self.units))
            waiting = moments(loss=every, early=every, late=root + block, root=root)
            found = {m: found[m] + waiting[m] for m in MOMENTS}
        return found

    def _reductions(self) -> dict[Moment, int]:
        """Count the reduction that is encoded, and of the one before it what travels, or also its
        input, not freed yet."""
        at_once = self.residence.gradients or self.residence.by_unit
        waits = self.plan.recipe.cluster.world == 1 or at_once
        before = 0 if waits else self.buffers.travelling(self.unit)
        held = self._held(self.unit) + before
        block, root = self._reduction(self.unit), self._reduction(self.root) + before
        later = len(self.units) > 1
        found = moments(early=self.early * held, late=later * held, root=root)
        return found | {
            "early sent": block + self.early * before,
            "late sent": block + later * before,
        }

    def _held(self, unit: UnitPlan) -> int:
        """Count the input of one unit's reduction: FSDP2's buffer, or our gradients."""
        if self.plan.recipe.cluster.world == 1:
            return 0
        if self.untouched:
            return self.plan.recipe.shards * shard_bytes(_trained(unit), self.grad)
        return self.weight * _to_train(unit)

    def _reduction(self, unit: UnitPlan) -> int:
        """Count one unit's rows sent and received, and the sums before they become gradients.
        Gradients that ours are encoded from are counted apart."""
        if self.plan.recipe.cluster.world == 1:
            return 0
        sums = shard_bytes(_trained(unit), self.grad)
        if self.untouched:
            return self._held(unit) + sums
        return self.buffers.reduction(unit) + sums + self._encoding(unit)

    def _telemetry(self) -> dict[Moment, int]:
        """Count telemetry. The kernel that encodes a first hop measures it; the sums of the hop
        after it are computed again in fp32, and summed in parts."""
        if self.untouched or len(self.plan.recipe.hops) < 2:
            return moments()
        if not self.config.tracking.telemetry_every:
            return moments()
        nodes = self.plan.recipe.cut // self.plan.recipe.cluster.gpus_per_node

        def of(unit: UnitPlan) -> int:
            first, second = unit.hops[:2]
            widest = max((s.numel for s in second.segments), default=0)
            turned = nodes * first.numel if any(s.codec.rotation for s in first.segments) else 0
            return FP32 * (nodes * first.coded_numel + turned + widest) + SUMMING

        block, root = of(self.unit), of(self.root)
        return moments(root=root) | {"early sent": block, "late sent": block}

    # ------------------------------------------------------------------ what computes

    def compute(self) -> list[Item]:
        acts = self.acts
        return [
            Item("activations", self._activations()),
            Item(
                "logits and loss",
                moments(loss=acts.loss) | {"eval loss": self.heldout.heldout_loss},
            ),
            Item("a block's backward", self._flow()),
            Item("gradient norm or update", self._tail()),
            Item("shared gradients of tensor parts", moments(update=self._shared())),
        ]

    def _shared(self) -> int:
        """Count this part's, all parts' and their sums."""
        parts = self.plan.parts
        return 0 if parts is None else (parts.tp + 2) * FP32 * parts.shared

    def _tail(self) -> dict[Moment, int]:
        """Count the sums of squares, and AdamW in plain torch."""
        if self.residence.offloads:
            return moments()
        shards = [p.shard_numel for u in self.plan.units for p in _trained(u)]
        ours = not self.kernels and (self.config.train.optimizer_state != "fp32" or self.planes)
        each = SCRATCH + (SPLITTING if self.planes else 0) if ours else 0
        updating = each * min(BATCH, sum(shards))
        return moments(update=max(square_bytes(shards, self.kernels), updating))

    def rollout(self, vocab: int) -> dict[Moment, int]:
        """Count what generation of a rollout's rows holds beyond an evaluation: all weights, keys
        and values, and each row's logits with their noise."""
        rl, data, recipe = self.config.rl, self.config.data, self.plan.recipe
        rows = -(-rl.prompts * rl.samples // recipe.cluster.world)
        cache = rows * data.seq_len * self.weight * cached_width(self.config.model)
        every = self.weight * sum(map(_numel, self.plan.units))
        whole = recipe.config.again and recipe.shards > 1
        held = cache + (every - self._gathered()["eval"] if whole else 0)
        return moments() | {"eval": held, "eval loss": held + self._drawn(vocab)}

    def captured(self, vocab: int) -> int:
        """Count what a graph of generation's passes keeps for the next rollout; nothing else may
        use it, and torch does not count it as allocated."""
        engine, model = self.config.engine, self.config.model
        graphs = engine.graph and engine.device != "cpu" and model.name == "llama"
        return self._drawn(vocab) if graphs and is_captured(self.config.rl.max_new_tokens) else 0

    def _drawn(self, vocab: int) -> int:
        """Count the logits of a rank's rows with their noise."""
        rl = self.config.rl
        rows = -(-rl.prompts * rl.samples // self.plan.recipe.cluster.world)
        return rows * vocab * (self.weight + SAMPLED)

    def _flow(self) -> dict[Moment, int]:
        """Count a unit's backward beyond the activations that its blocks begin with. A block that
        has gone back has left its gradients in their place, which wait for the unit's reduction."""
        blocks = self.unit.unit.blocks
        each = self.weight * _to_train(self.unit) // blocks
        flow = self.acts.backward(each) + (blocks - 1) * max(0, each - self.acts.between)
        return moments(early=flow, late=flow) | {"early sent": 0, "late sent": 0}

    def _activations(self) -> dict[Moment, int]:
        """Count the blocks that have not gone back yet; then what flows on to the next."""
        acts = self.acts
        early = self._left(self.early) * acts.between + acts.recomputed
        found = moments(loss=acts.kept, early=early)
        sent: dict[Moment, int] = {
            "early sent": self._left(self.early + 1) * acts.between + acts.row,
            "late sent": acts.row + self._embedding(),
        }
        evaluated: dict[Moment, int] = {"eval": self.heldout.passing, "eval loss": self.heldout.row}
        late = self.unit.unit.blocks * acts.between + acts.recomputed
        return found | sent | evaluated | {"late": late}

    def _embedding(self) -> int:
        """Count gradients of all tokens at the embedding of tensor parts, before and after those of
        other parts' tokens are masked."""
        parts = self.plan.parts
        return 0 if parts is None else 2 * parts.tp * self.acts.row

    def constants(self) -> list[Item]:
        return [
            Item("CUDA and libraries", always(CONTEXT), assumed=True),
            Item("NCCL", always(NCCL if self.config.cluster.world > 1 else 0), assumed=True),
        ]


def _numel(unit: UnitPlan) -> int:
    return sum(p.numel for p in unit.unit.parameters)


def _trained(unit: UnitPlan) -> list[Parameter]:
    return [p for p in unit.unit.parameters if p.name in unit.unit.trainable]


def _to_train(unit: UnitPlan) -> int:
    return sum(p.numel for p in _trained(unit))


def _stored(unit: UnitPlan, parameter: Parameter) -> bool:
    return parameter.name in unit.unit.stored
