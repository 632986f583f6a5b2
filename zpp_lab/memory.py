"""What each rank of a real run will hold, by formula, before anything is allocated.

A step's memory rises and falls, so every item is counted at five moments:

    loss    all activations are there, the loss goes back
    early   one of the first blocks to go back: most activations are still there
    late    the last block to go back: one block's activations, nearly all gradients
    root    the root unit is reduced: activations are gone, all gradients are there
    update  norm, clipping and optimizer

The peak is the largest moment. Rank 0 is counted, which never has less than others: the last
shards may be shorter. Units follow what FSDP2 and `collectives/` keep alive: the gathered weights
of the unit that computes, one payload for each unit gathered ahead, a reduction's input until the
next reduction. Within a block what it keeps, its temporaries and its gradients are all counted,
although the last gradient comes when most activations have gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from zpp_lab.activations import FP32, Activations
from zpp_lab.collectives.peer import SLOTS
from zpp_lab.config import Config
from zpp_lab.engines.fsdp_wrap import is_untouched
from zpp_lab.engines.norm import FOLD_NUMEL
from zpp_lab.layout import Parameter
from zpp_lab.models.lora import A as LORA_A
from zpp_lab.optimizers import BATCH, SCRATCH, StateKind, state_bytes
from zpp_lab.plan import Plan, UnitPlan

Moment = Literal["loss", "early", "late", "root", "update"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

GIB = 2**30
CONTEXT = GIB  # assumed: a process's CUDA context, kernels, library workspaces
NCCL = GIB // 2  # assumed: buffers of the process groups of one rank
SQUARED = 20  # bytes an element while a gradient's norm is taken: fp32, two of fp64


@dataclass(frozen=True)
class Item:
    """One kind of memory of one rank, in bytes at each moment. `place`: gpu or host."""

    name: str
    nbytes: dict[Moment, int]
    place: Literal["gpu", "host"] = "gpu"
    assumed: bool = False

    @property
    def most(self) -> int:
        return max(self.nbytes.values())


@dataclass(frozen=True)
class Estimate:
    """All items of one rank."""

    items: tuple[Item, ...]

    def at(self, moment: Moment) -> int:
        """Bytes on the GPU, assumed constants included."""
        return sum(i.nbytes[moment] for i in self.items if i.place == "gpu")

    @property
    def peak_moment(self) -> Moment:
        return max(MOMENTS, key=self.at)

    @property
    def peak(self) -> int:
        """Bytes that the device must have."""
        return self.at(self.peak_moment)

    @property
    def tensors(self) -> int:
        """The peak without assumed constants: what torch.cuda.max_memory_allocated would say."""
        return self.peak - sum(i.most for i in self.items if i.assumed and i.place == "gpu")

    @property
    def host(self) -> int:
        return sum(i.most for i in self.items if i.place == "host")

    def item(self, name: str) -> Item:
        return next(i for i in self.items if i.name == name)


def estimate(plan: Plan, config: Config, vocab: int) -> Estimate:
    """What each rank of `plan`'s cluster holds on engine=fsdp with one GPU a rank.

    ValueError for models other than the built-in decoder, whose activations no formula knows.
    """
    if config.model.name != "llama":
        raise ValueError(
            f"model={config.model.name}: only the built-in decoder's activations have a formula; "
            "take a model.* preset of the same shape"
        )
    acts = Activations.of(config, vocab)
    if plan.stored:
        acts = replace(acts, adapters=_adapters(plan), head_trained=False)
    holder = _Rank(plan, config, acts)
    items = [*holder.state(), *holder.wires(), *holder.compute(), *holder.constants()]
    return Estimate(tuple(i for i in items if i.most))


def shard_bytes(parameters: Iterable[Parameter], itemsize: int = FP32) -> int:
    """Rank 0's shards, padding included."""
    return itemsize * sum(p.shard_numel for p in parameters)


def optimizer_bytes(parameters: Iterable[Parameter], kind: StateKind) -> int:
    """Both moments of rank 0's shards, scales included."""
    shards = ((-(-p.shape[0] // p.world), *p.shape[1:]) if p.shape else (1,) for p in parameters)
    return sum(state_bytes(shard, kind) for shard in shards)


def secondary_bytes(plan: Plan) -> int:
    """hpZ: of every unit that is gathered again, one forward payload row a node."""
    if not plan.recipe.config.secondary:
        return 0
    rows = sum(u.forward.nbytes for u in plan.units if u.gathers_backward)
    return plan.recipe.cluster.nodes * rows


def base_bytes(plan: Plan) -> int:
    """A rank's payload rows of a frozen base."""
    return sum(u.stored.nbytes for u in plan.units)


def payload_bytes(plan: Plan, unit: UnitPlan, backward: bool = False) -> int:
    """The buffer that one gather of `unit` fills, and what it holds of the node on the way."""
    layout = unit.backward if backward else unit.forward
    if unit.hierarchical and not (backward and plan.recipe.config.secondary):
        return (plan.recipe.shards + plan.recipe.cluster.nodes) * layout.nbytes
    return plan.recipe.shards * layout.nbytes


class _Rank:
    """Items of one rank, in groups."""

    def __init__(self, plan: Plan, config: Config, acts: Activations) -> None:
        self.plan, self.config, self.acts = plan, config, acts
        recipe = plan.recipe
        self.weight, self.grad = recipe.weights_dtype.itemsize, recipe.grads_dtype.itemsize
        self.untouched = is_untouched(plan, config.engine.ordered)
        self.root = plan.units[-1]
        self.blocks = plan.units[:-1]
        self.block = max(self.blocks, key=_numel)

    # ------------------------------------------------------------------ what stays

    def state(self) -> list[Item]:
        every = [p for u in self.plan.units for p in u.unit.parameters if not _stored(u, p)]
        trained = [p for u in self.plan.units for p in _trained(u)]
        place: Literal["gpu", "host"] = "host" if self.config.engine.offload else "gpu"
        kind = self.config.train.optimizer_state
        grads = _always(shard_bytes(trained))
        if self.plan.reductions == 1:  # else earlier micro-steps have left theirs
            coming = shard_bytes(p for u in (self.root, self.block) for p in _trained(u))
            grads |= {"loss": 0, "early": 0, "late": max(0, grads["late"] - coming)}
        return [
            Item("master weights, fp32", _always(shard_bytes(every)), place),
            Item("frozen base, as it travels", _always(base_bytes(self.plan))),
            Item(f"optimizer state, {kind}", _always(optimizer_bytes(trained, kind)), place),
            Item("gradients, fp32", grads, place),
            Item("secondary partition", _always(secondary_bytes(self.plan))),
        ]

    # ------------------------------------------------------------------ what a unit needs

    def wires(self) -> list[Item]:
        block, root = self._reduction(self.block), self._reduction(self.root)
        reduction = _moments(early=block, late=block, root=root)
        return [
            Item("gathered weights", self._gathered()),
            Item("gather buffers", self._payloads()),
            Item("whole gradients", self._whole_gradients()),
            Item("reduction buffers", reduction),
            Item("peer-memory slots", _always(self._slots())),
        ]

    def _gathered(self) -> dict[Moment, int]:
        root, block = self.weight * _numel(self.root), self.weight * _numel(self.block)
        found = _moments(loss=root, early=root + block, late=root + block, root=root)
        if self.plan.recipe.config.stage != 3:
            every = root + self.weight * sum(map(_numel, self.blocks))
            found |= {"loss": every, "early": every}
            if self.plan.micro_steps > 1:  # they stay until the last one's backward
                found["late"] = every
        return found

    def _payloads(self) -> dict[Moment, int]:
        """Of the units gathered ahead in backward."""
        if self.plan.recipe.config.stage != 3:
            return _moments()
        each = max(payload_bytes(self.plan, u, backward=True) for u in self.blocks)
        ahead = min(max(1, self.config.engine.prefetch), len(self.blocks))
        return _moments(loss=ahead * each, early=ahead * each)

    def _whole_gradients(self) -> dict[Moment, int]:
        """A block's until it is reduced, and the root's: the head's from the loss on, all at the
        end. With one reduction for several micro-steps every unit's, in reduce_dtype."""
        head = 0 if self.plan.stored else self.weight * self.acts.vocab * self.config.model.dim
        root, block = self.weight * _to_train(self.root), self.weight * _to_train(self.block)
        if not self.untouched:
            block *= 2  # ours are encoded from: they live as long as FSDP2's buffer would
        found = _moments(early=head + block, late=head + block, root=root)
        if self.config.model.tied_head:
            found["root"] += head  # the embedding's part, before the two are added
        if self.plan.accumulate_last and self.plan.micro_steps > 1:
            root, block = self.grad * _to_train(self.root), self.grad * _to_train(self.block)
            every = root + self.grad * sum(map(_to_train, self.blocks))
            waiting = _moments(loss=every, early=every, late=root + block, root=root)
            found = {m: found[m] + waiting[m] for m in MOMENTS}
        return found

    def _reduction(self, unit: UnitPlan) -> int:
        """Of one unit: what goes out and what comes in; sums that are not the gradients' own."""
        if self.plan.recipe.cluster.world == 1:
            return 0
        sums = shard_bytes(_trained(unit), self.grad)
        extra = sums if self.plan.reductions > 1 or self.grad != FP32 else 0
        if self.untouched:
            return self.plan.recipe.shards * sums + extra
        both = 1 if self._peer() else 2  # in peer memory what goes out lies in a slot
        return both * sum(self._rows(unit)) + extra

    def _rows(self, unit: UnitPlan) -> list[int]:
        """Bytes that one rank sends (and gets) on each hop, its own rows included."""
        cluster = self.plan.recipe.cluster
        counts = [cluster.world] if len(unit.hops) == 1 else [cluster.world, cluster.nodes]
        return [n * hop.nbytes for n, hop in zip(counts, unit.hops, strict=True)]

    def _peer(self) -> bool:
        one_host = self.plan.recipe.cluster.nodes == 1
        transport = self.config.engine.transport
        return not self.untouched and (transport == "peer" or (transport == "auto" and one_host))

    def _slots(self) -> int:
        if not self._peer():
            return 0
        gather = max(max(u.forward.nbytes, u.backward.nbytes) for u in self.plan.units)
        raw = max(self._raw_row(u) for u in self.plan.units)
        exchange = max(sum(self._rows(u)) for u in self.plan.units)
        return SLOTS["gather"] * max(gather, raw) + SLOTS["exchange"] * exchange

    def _raw_row(self, unit: UnitPlan) -> int:
        """Of a gather of the master weights, and of a frozen base as it is."""
        live = [p for p in unit.unit.parameters if not _stored(unit, p)]
        return shard_bytes(live, self.weight) + unit.stored.nbytes

    # ------------------------------------------------------------------ what computes

    def compute(self) -> list[Item]:
        acts = self.acts
        shards = [p.shard_numel for u in self.plan.units for p in _trained(u)]
        squared = min(sum(shards), max(*shards, FOLD_NUMEL))
        norm = 0 if self.config.engine.offload else max(SQUARED * squared, self._updating(shards))
        return [
            Item("activations", _moments(acts.kept, acts.kept + acts.recomputed, acts.block)),
            Item("logits and loss", _moments(loss=acts.loss)),
            Item("temporaries of a block", _moments(early=acts.temporaries, late=acts.temporaries)),
            Item("gradient norm or update", _moments(update=norm)),
        ]

    def _updating(self, shards: list[int]) -> int:
        """What our own AdamW needs at most; its kernel and torch's fused one need nothing."""
        if self.config.train.optimizer_state == "fp32":
            return 0
        return SCRATCH * min(BATCH, sum(shards))

    def constants(self) -> list[Item]:
        world = self.plan.recipe.cluster.world
        return [
            Item("CUDA and libraries", _always(CONTEXT), assumed=True),
            Item("NCCL", _always(NCCL if world > 1 else 0), assumed=True),
        ]


def _adapters(plan: Plan) -> int:
    """Elements a token between the two adapters of every layer of the largest block."""
    blocks = [u.unit.parameters for u in plan.units[:-1]]
    return max(sum(p.shape[0] for p in b if p.name.endswith(LORA_A)) for b in blocks)


def _always(nbytes: int) -> dict[Moment, int]:
    return dict.fromkeys(MOMENTS, nbytes)


def _moments(
    loss: int = 0, early: int = 0, late: int = 0, root: int = 0, update: int = 0
) -> dict[Moment, int]:
    return {"loss": loss, "early": early, "late": late, "root": root, "update": update}


def _numel(unit: UnitPlan) -> int:
    return sum(p.numel for p in unit.unit.parameters)


def _trained(unit: UnitPlan) -> list[Parameter]:
    return [p for p in unit.unit.parameters if p.name in unit.unit.trainable]


def _to_train(unit: UnitPlan) -> int:
    return sum(p.numel for p in _trained(unit))


def _stored(unit: UnitPlan, parameter: Parameter) -> bool:
    return parameter.name in unit.unit.stored
