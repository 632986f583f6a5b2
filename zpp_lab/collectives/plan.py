"""What a recipe moves in one step, before anything moves: layouts and bytes of every unit.

ZeRO as data movement
    stage 3  weights are gathered for the forward and again for the backward of each
             micro-step (a unit with reshard=False, the root, only for the forward), and
             gradients are reduced
    stage 2  weights are gathered once a step; gradients are reduced
    stage 1  as stage 2, and gradients of several micro-steps are always added up first
kept     (`recipe.sharding.weights=node`) as stage 3, but gathers stay inside the node, which keeps
         the weights in param_dtype; after the update each rank sends its new shard to the ranks of
         its own place on other nodes, once a step. With `weights=none` and `update=differences` as
         stage 2: the node gathers them once a step
A reduction happens at every micro-step, or at the last only (`accumulate`).

A unit that a step does not run (an unused module, a branch not taken) moves nothing in it; one
that runs twice is gathered twice. `StepUse` says what a step ran; without it every unit counts
once a micro-step.

A pattern that matches nothing, and a wire whose bits are all exempted, are errors of `Plan.build`:
so of every engine, plan and dry run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from zpp_lab.codecs import Codec, RawCodec, ShamCodec, build_codec
from zpp_lab.codecs.kernels.memory import between
from zpp_lab.codecs.layout import Layout, Parameter
from zpp_lab.collectives.acts import PartsPlan
from zpp_lab.collectives.context import Key, RowMemory
from zpp_lab.collectives.pipe import PipePlan
from zpp_lab.collectives.recipe import Recipe, check_patterns
from zpp_lab.collectives.traffic import (
    NOTHING,
    Leg,
    Traffic,
    gather_traffic,
    hop_traffic,
    node_gather_traffic,
    secondary_traffic,
    update_traffic,
)
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, FORWARD, ROLLOUT, UPDATE, WIRES, Wire, wires_among

Bytes = dict[Wire, Traffic]


@dataclass(frozen=True)
class Unit:
    """Parameters that travel together. The root unit keeps its weights until its backward."""

    name: str
    parameters: tuple[Parameter, ...]
    trainable: frozenset[str]
    reshard: bool = True
    stored: frozenset[str] = frozenset()  # a frozen base, kept and sent as one payload for good
    blocks: int = 1  # of the model, that it holds; the root none
    stage: int = 0  # whose ranks have it


@dataclass(frozen=True)
class PassUse:
    """What one forward and backward ran: calls of each unit, and how many of them backward
    came back to (none when the loss or the gradients do not need it)."""

    forwards: Mapping[str, int]
    backwards: Mapping[str, int]

    def check_once(self, by_unit: bool) -> None:
        """ValueError where a unit runs twice in a forward, and its gradients have to be reduced
        once: at the last micro-step, or to be clipped by unit (`by_unit`). FSDP2 would reduce them
        after each call's backward."""
        if again := [name for name, calls in self.forwards.items() if calls > 1]:
            raise ValueError(
                f"{', '.join(again)}: runs more than once in a forward, so its gradients cannot "
                + (
                    "be clipped by unit: set train.clip_by=norm"
                    if by_unit
                    else "wait for the last micro-step: set train.accumulate=every"
                )
            )


@dataclass(frozen=True)
class StepUse:
    """What one step ran: its micro-steps, and for each unit the parameters that had a gradient
    in each of its reductions."""

    passes: tuple[PassUse, ...]
    reduced: Mapping[str, tuple[frozenset[str], ...]]


@dataclass(frozen=True)
class UnitPlan:
    """A unit's layouts, and the legs on which they travel."""

    unit: Unit
    recipe: Recipe
    hierarchical: bool = False  # gathers send each byte between nodes once
    bits_only: bool = False  # layouts without what takes as many bytes as it has

    def _layout(self, wire: Wire, trainable_only: bool = False, cut: int = 0) -> Layout:
        """`cut`: into how many parts, where not as weights are."""
        chosen = [
            (p, self._codec(wire, p))
            for p in self.unit.parameters
            if not trainable_only or p.name in self.unit.trainable
        ]
        if self.bits_only:
            chosen = [(p, c) for p, c in chosen if not isinstance(c, RawCodec | ShamCodec)]
        return Layout.build(
            [p.name for p, _ in chosen],
            [(replace(p, world=cut) if cut else p).shard_numel for p, _ in chosen],
            [codec for _, codec in chosen],
            [p.part for p, _ in chosen],
        )

    def _codec(self, wire: Wire, parameter: Parameter) -> Codec:
        stored = parameter.name in self.unit.stored
        return self.recipe.base_codec(parameter) if stored else self.recipe.codec(wire, parameter)

    @cached_property
    def forward(self) -> Layout:
        return self._layout(FORWARD)

    @cached_property
    def backward(self) -> Layout:
        return self.forward if self.recipe.config.secondary else self._layout(BACKWARD)

    @cached_property
    def stored(self) -> Layout:
        """The frozen base alone, the same on both wires."""
        return self.forward.select(self.unit.stored)

    @cached_property
    def rollout(self) -> Layout:
        return self._layout(ROLLOUT)

    def live(self, wire: Wire) -> Layout:
        """What a gather on `wire` encodes anew: all but the frozen base."""
        layouts = {FORWARD: self.forward, BACKWARD: self.backward, ROLLOUT: self.rollout}
        layout = layouts[wire]
        return layout.select({s.name for s in layout.segments} - self.unit.stored)

    @cached_property
    def update(self) -> Layout:
        """What a step sends of the weights that nodes keep: those that are trained. Empty where
        they keep none."""
        if not self.recipe.kept:
            return Layout(())
        return self._layout(UPDATE, trainable_only=True)

    @property
    def remembered(self) -> tuple[str, ...]:
        """Parameters that travel as differences, from what nodes then must remember."""
        if not self.recipe.differences:
            return ()
        return tuple(s.name for s in self.update.segments if not isinstance(s.codec, RawCodec))

    @cached_property
    def raw(self) -> Layout:
        """Every parameter as its own bytes."""
        parameters, dtype = self.unit.parameters, self.recipe.weights_dtype
        names, numels = [p.name for p in parameters], [p.shard_numel for p in parameters]
        return Layout.build(names, numels, [RawCodec(p.dtype or dtype) for p in parameters])

    @cached_property
    def hops(self) -> tuple[Layout, ...]:
        cut = self.recipe.cut
        return tuple(self._layout(wire, trainable_only=True, cut=cut) for wire in self.recipe.hops)

    @cached_property
    def memories(self) -> dict[Key, RowMemory]:
        """What each rank remembers of its reductions, wire by wire in the layouts' order. A row for
        each shard of the cluster on the first hop, for each of its place in the nodes on the
        second."""
        found: dict[Key, RowMemory] = {}
        known = {p.name: p for p in self.unit.parameters}
        cut, layouts = self.recipe.cut, self.hops[:2]  # of what returns nothing is remembered
        for hop, wire in enumerate(self.recipe.hops[:2]):
            given = between(*layouts) if hop else layouts[0]
            rows = cut // self.recipe.cluster.gpus_per_node if hop else cut
            for segment in given.segments:
                memory = self.recipe.memory(wire, known[segment.name])
                if memory is not None:
                    numel = segment.coded_numel if hop else segment.numel
                    domain = segment.codec.rotation if hop else None
                    found[wire, segment.name] = RowMemory(memory, rows, numel, domain)
        return found

    @property
    def gathers_backward(self) -> bool:
        """Whether backward needs a gather of its own (in the node or across the cluster)."""
        return self.recipe.config.again and self.unit.reshard

    @property
    def keeps_secondary(self) -> bool:
        """Whether hpZ keeps rows for backward. In one node that is the rank's own, which it encodes
        again: a copy would save nothing on the wire."""
        recipe = self.recipe
        return recipe.config.secondary and self.gathers_backward and recipe.cluster.nodes > 1

    @property
    def own_backward(self) -> bool:
        """Whether backward uses weights that differ from the forward's."""
        return (
            self.gathers_backward
            and not self.recipe.config.secondary
            and (self.forward.stochastic or self.backward != self.forward)
        )

    @property
    def repeats_forward(self) -> bool:
        """Whether backward's own gather brings the bits that the forward's brought."""
        return self.gathers_backward and not self.recipe.config.secondary and not self.own_backward

    def legs(self, use: StepUse | None = None) -> list[Leg]:
        """Return what a step that ran as `use` says sends; without it, what each collective
        sends."""
        trainable = self.unit.trainable
        reduced = use.reduced.get(self.unit.name, ()) if use else (trainable,)
        legs = self.gather_legs(*self.gathers(use.passes) if use else (1, 1))
        for i, present in enumerate(reduced, 1):
            legs += self.reduce_legs(trainable & present, i == len(reduced))
        if self.recipe.kept:
            traffic = update_traffic(self.recipe.cluster, self.update.nbytes)
            legs.append(Leg(UPDATE, self.update, traffic))
        return legs

    def leg(self, wire: Wire) -> Leg:
        """Return the first leg on `wire`."""
        return next(leg for leg in self.legs() if leg.wire == wire)

    def gather_legs(self, forwards: int, backwards: int) -> list[Leg]:
        """Return what so many gathers send; none where every rank has all weights."""
        recipe = self.recipe
        if recipe.shards == 1:
            return []
        legs = [Leg(FORWARD, self.forward, self._gathered(self.forward), forwards)]
        if self.gathers_backward:
            traffic = self._gathered(self.backward, recipe.config.secondary)
            legs.append(Leg(BACKWARD, self.backward, traffic, backwards))
        return legs

    def rollout_legs(self, gathers: int) -> list[Leg]:
        """Return what so many gathers for generation send."""
        if self.recipe.shards == 1:
            return []
        return [Leg(ROLLOUT, self.rollout, self._gathered(self.rollout), gathers)]

    def _gathered(self, layout: Layout, secondary: bool = False) -> Traffic:
        recipe, cluster = self.recipe, self.recipe.cluster
        if recipe.config.copied:
            return node_gather_traffic(cluster, layout.nbytes)
        if recipe.kept or secondary:
            return secondary_traffic(cluster, layout.nbytes)
        return gather_traffic(cluster, layout.nbytes, self.hierarchical)

    def gathers(self, passes: Iterable[PassUse]) -> tuple[int, int]:
        """Forward and backward gathers that these micro-steps of one step need."""
        name, used = self.unit.name, list(passes)
        calls = [use.forwards.get(name, 0) for use in used]
        if not self.recipe.config.again:
            return min(1, sum(calls)), 0
        if not self.unit.reshard:
            return sum(min(1, n) for n in calls), 0
        return sum(calls), sum(use.backwards.get(name, 0) for use in used)

    def reduce_legs(self, present: Set[str], last: bool = True) -> list[Leg]:
        """Return what a step's last reduction sends, or one before it. `present`: the parameters
        with a gradient; others are not sent."""
        recipe, layouts = self.recipe, [hop.select(present) for hop in self.hops]
        if not present:
            return []
        rows = [layout.nbytes for layout in layouts]
        sent = hop_traffic(recipe.cluster, recipe.hops, rows, recipe.cut)
        # one hop serves both wires
        pairs = zip(sent, layouts * 2, strict=False)
        legs = [Leg(wire, layout, traffic) for (wire, traffic), layout in pairs]
        return legs[:1] if recipe.node_sums and not last else legs


@dataclass(frozen=True)
class Plan:
    """All units of a model under a recipe, and what one training step moves."""

    units: tuple[UnitPlan, ...]
    recipe: Recipe
    micro_steps: int = 1
    accumulate_last: bool = False
    rollouts: bool = False  # whether weights are gathered for generation too
    parts: PartsPlan | None = None  # with tensor parts: units are those of each one's cell
    pipe: PipePlan | None = None  # with several stages: units are those of all of them

    @classmethod
    def build(
        cls,
        units: Iterable[Unit],
        recipe: Recipe,
        *,
        micro_steps: int = 1,
        accumulate: str = "every",
        gather: str = "auto",
        rollouts: bool = False,
        parts: PartsPlan | None = None,
        pipe: PipePlan | None = None,
    ) -> Plan:
        """ValueError where this model would get less than the recipe asks for: a pattern or a rule
        that matches none of its parameters, a wire that asks for bits and carries none."""
        cluster = recipe.cluster
        several = cluster.nodes > 1 and cluster.gpus_per_node > 1
        hierarchical = several and gather != "flat" and not recipe.config.copied
        last = accumulate == "last" or recipe.config.parts[1] == "none"
        plan = cls(
            tuple(UnitPlan(unit, recipe, hierarchical) for unit in units),
            recipe,
            micro_steps,
            last,
            rollouts,
            parts,
            pipe,
        )
        plan._check()
        return plan

    def training(self, names: Set[str]) -> Plan:
        """The same, of a model that trains these parameters."""
        units = [
            replace(
                u,
                unit=replace(
                    u.unit, trainable=frozenset(p.name for p in u.unit.parameters) & names
                ),
            )
            for u in self.units
        ]
        return replace(self, units=tuple(units))

    def cell(self, part: int) -> Plan:
        """Return the plan of one tensor part's cell, without what parts exchange."""
        if self.parts is None:
            return self
        units = []
        for u in self.units:
            own = [replace(p, part=part if p.parts > 1 else 0) for p in u.unit.parameters]
            units.append(replace(u, unit=replace(u.unit, parameters=tuple(own))))
        return replace(self, units=tuple(units), parts=None)

    def stage(self, number: int) -> Plan:
        """Return the plan of one stage's ranks, without what stages send each other."""
        if self.pipe is None:
            return self
        units, parts = tuple(u for u in self.units if u.unit.stage == number), self.parts
        if parts is not None:
            every = [p for u in units for p in u.unit.parameters]
            last = number == self.pipe.ranks - 1
            parts = replace(
                parts,
                blocks=sum(u.unit.blocks for u in units),
                shared=sum(p.shard_numel for p in every if p.parts == 1),
                ends=int(number == 0) + int(last),
                last=last,
            )
        return replace(self, units=units, parts=parts, pipe=None)

    def under(self, recipe: Recipe) -> Plan:
        """The same units under the recipe of another phase: as cut, and with as many micro-steps.
        ValueError as of `build`, and where nodes would have to remember other parameters."""
        units = tuple(replace(unit, recipe=recipe) for unit in self.units)
        parts = replace(self.parts, recipe=recipe) if self.parts else None
        pipe = replace(self.pipe, recipe=recipe) if self.pipe else None
        plan = replace(self, units=units, recipe=recipe, parts=parts, pipe=pipe)
        plan._check()
        if [u.remembered for u in units] != [u.remembered for u in self.units]:
            raise ValueError(
                "recipe.phases with recipe.sharding.update=differences: every phase must "
                f"quantize the same parameters on {UPDATE}, since node-replicated weights "
                "are sums of differences; do not change recipe.rules for that wire between phases"
            )
        return plan

    def _check(self) -> None:
        parameters = [p for u in self.units for p in u.unit.parameters]
        check_patterns(self.recipe, parameters, self.stored)
        _check_bits(self)

    @property
    def gradients_wait(self) -> bool:
        """Whether those of earlier micro-steps wait for the last one's."""
        return self.accumulate_last and self.micro_steps > 1

    @property
    def reductions(self) -> int:
        """Reductions of each unit in a step."""
        return 1 if self.accumulate_last else self.micro_steps

    def all_used(self, absent: frozenset[str] = frozenset()) -> StepUse:
        """Every unit once a micro-step, every trainable parameter but `absent` with a gradient."""
        once = dict.fromkeys((u.unit.name for u in self.units), 1)
        reduced: dict[str, frozenset[str]] = {}
        for unit in (u.unit for u in self.units):  # several stages may have a root each
            reduced[unit.name] = reduced.get(unit.name, frozenset()) | unit.trainable - absent
        times = {name: (present,) * self.reductions for name, present in reduced.items()}
        return StepUse((PassUse(once, once),) * self.micro_steps, times)

    def step_bytes(self, use: StepUse | None = None) -> Bytes:
        """Bytes that all ranks together send in one step, in closed form; of a step that uses all
        there is, unless `use` says otherwise."""
        use = use or self.all_used()
        sent = leg_bytes(leg for unit in self.units for leg in unit.legs(use))
        if self.parts is None and self.pipe is None:
            return sent
        every = leg_bytes(self.acts_legs())
        add_bytes(every, sent, self.parts.tp if self.parts else 1)
        return every

    def acts_legs(self) -> list[Leg]:
        """Return what tensor parts and stages exchange in a step."""
        return [leg for plan in (self.parts, self.pipe) if plan for leg in plan.legs()]

    def rollout_bytes(self, passes: int | None) -> Bytes:
        """Bytes that all ranks together send for generation: with each unit gathered once (None),
        or for each of so many passes, where weights do not stay whole (stage 3)."""
        gathers = 1 if passes is None else passes if self.recipe.config.again else min(1, passes)
        return leg_bytes(leg for unit in self.units for leg in unit.rollout_legs(gathers))

    def quantized_share(self) -> dict[Wire, float]:
        """Of a step's bytes on each wire that sends any, and of a rollout's, the part that codecs
        made; no sham's."""
        return quantized_share([(1, self)])

    @property
    def made(self) -> Plan:
        """The plan of the bytes that codecs make, and of no others; no sham's."""
        units = tuple(replace(u, bits_only=True) for u in self.units)
        parts = replace(self.parts, bits_only=True) if self.parts else None
        pipe = replace(self.pipe, bits_only=True) if self.pipe else None
        return replace(self, units=units, parts=parts, pipe=pipe)

    @cached_property
    def memories(self) -> dict[Key, RowMemory]:
        """What each rank remembers of its reductions."""
        return {key: own for unit in self.units for key, own in unit.memories.items()}

    @property
    def memory_bytes(self) -> int:
        """Of a rank's memories, as they are stored; a step holds as many again until it is done."""
        return sum(own.nbytes for own in self.memories.values())

    @cached_property
    def stored(self) -> frozenset[str]:
        """Every parameter of a frozen base."""
        return frozenset().union(*(u.unit.stored for u in self.units))


def _check_bits(plan: Plan) -> None:
    """ValueError for a wire of this plan that asks for bits, and on which nothing travels in any.
    A frozen base has its own codec, whatever the recipe."""
    recipe, units = plan.recipe, plan.units
    if (recipe.config.acting or recipe.config.piping) and plan.parts is plan.pipe is None:
        raise ValueError(
            f"recipe {recipe.config.name}: recipe.acts has no wire, as this model has no tensor "
            "parts and no stages: set cluster.tp (zpp_lab.shard: tp=2), or leave recipe.acts out"
        )
    if recipe.cluster.world == 1:
        return  # which `Recipe` has looked at
    wires: dict[Wire, dict[str, Codec]] = {}
    rolled = [leg for u in units for leg in u.rollout_legs(1)] if plan.rollouts else []
    for leg in (*(leg for u in units for leg in u.legs()), *rolled):
        if WIRES[leg.wire].pattern != "hop" or leg.wire in recipe.hops:
            live = (s for s in leg.layout.segments if s.name not in plan.stored)
            wires.setdefault(leg.wire, {}).update((s.name, s.codec) for s in live)
    known = {p.name: p for u in units for p in u.unit.parameters}
    for wire, codecs in wires.items():
        if recipe.asks(wire) and all(isinstance(codec, RawCodec) for codec in codecs.values()):
            counts = Counter(recipe.raw_by(wire, known[name]) for name in codecs)
            why = ", ".join(f"{count} by {setting}" for setting, count in counts.most_common())
            raise ValueError(
                f"recipe {recipe.config.name}, {wire}: bits are set, but all {len(codecs)} "
                f"parameters of this model would be sent uncompressed ({why}); exempt fewer, or "
                "leave that wire without a codec (recipe=zero3: all wires)"
            )
        if recipe.remembers(wire) and wire not in {
            own for unit in units for own, _ in unit.memories
        }:
            raise ValueError(
                f"recipe {recipe.config.name}, {wire}: memory.kind is set, but no quantized "
                "parameter of this model has an error-feedback residual; exempt fewer, or leave "
                "memory.kind out"
            )
    for wire in (w for w in recipe.config.wires if WIRES[w].carries != "activations"):
        alike = [w for w in wires if WIRES[w].short == WIRES[wire].short]
        if wire not in wires and recipe.asks(wire) and not any(map(recipe.asks, alike)):
            raise ValueError(
                f"recipe {recipe.config.name}, {wire}: bits are set, but this plan sends nothing "
                f"there, only on {', '.join(wires)}; set the codec or the rule for those"
            )
    base = [s for u in units for s in u.stored.segments]
    asked = not isinstance(build_codec(recipe.lora.base_codec, recipe.weights_dtype), RawCodec)
    if base and asked and all(isinstance(s.codec, RawCodec) for s in base):
        raise ValueError(
            f"model.lora.base_codec: bits are set, but all {len(base)} parameters of the base are "
            "exempt (model.lora.base_exempt); exempt fewer, or use lora=raw"
        )


def plans_by_step(plan: Plan, config: Config) -> dict[int, Plan]:
    """By the steps done when its phase begins each plan of a run that begins with `plan`."""
    later = {p.first: plan.under(Recipe.of(p.config)) for p in config.phases[1:]}
    return {0: plan, **later}


def quantized_share(phases: Iterable[tuple[int, Plan]]) -> dict[Wire, float]:
    """As a plan's, of so many steps under each."""
    every, made = no_bytes(), no_bytes()
    for steps, plan in phases:
        for total, one in ((every, plan), (made, plan.made)):
            add_bytes(total, one.step_bytes(), steps)
            if plan.rollouts:
                add_bytes(total, one.rollout_bytes(None), steps)
    return {
        wire: sum(made.get(wire, NOTHING)) / sum(sent) for wire, sent in every.items() if sum(sent)
    }


def bytes_per_step(phases: Sequence[tuple[int, Plan]], per_rollout: int = 1) -> int | float:
    """Of all wires and ranks; the mean over so many steps under each plan. per_rollout: steps that
    learn from a rollout, where plans have any, which gathers each unit once."""
    every, begun = no_bytes(), 0
    for steps, plan in phases:
        add_bytes(every, plan.step_bytes(), steps)
        rollouts = -(-(begun + steps) // per_rollout) - -(-begun // per_rollout)
        add_bytes(every, plan.rollout_bytes(None), rollouts if plan.rollouts else 0)
        begun += steps
    total = sum(map(sum, every.values()))
    return total / begun if total % begun else total // begun


def no_bytes() -> Bytes:
    """Of the wires that every recipe has; a fifth one is there once it has carried something."""
    return dict.fromkeys(wires_among(), NOTHING)


def leg_bytes(legs: Iterable[Leg]) -> Bytes:
    total = no_bytes()
    for leg in legs:
        add_bytes(total, {leg.wire: leg.traffic}, leg.times)
    return total


def add_bytes(total: Bytes, more: Mapping[Wire, Traffic], times: int = 1) -> None:
    for wire, traffic in more.items():
        total[wire] = total.get(wire, NOTHING) + traffic * times
