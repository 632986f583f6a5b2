"""Searches the fastest plan under a memory limit and a loss limit.

Memory and loss come first: both are cheap and exact. Remaining plans are visited by a lower bound
of their time, the longest that the GPU, the host or a link is busy. A plan is predicted only while
its bound is below the best time, and skipped where a slow plan of the same build has no more bits
on any wire and keeps nothing busy for longer. Plans within `TIE` count as equally fast: of those
the one with the most bits is chosen, among the fastest found and the `TRIES` gentlest.

Figures of thousands of plans come from those of a hundred: memory at a moment, and busy seconds of
a link or the GPU, are sums of a term of the weights, one of the gradients and one of the memory
settings. So a plan is weights + gradients + settings - 2 × reference. Recomputed activations and
larger units have references of their own. Untouched FSDP2 is measured whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import le
from typing import Any

from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.recipe import ShardingConfig, twin
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.engines.build import plan_of, vocabulary
from zpp_lab.engines.units import is_untouched
from zpp_lab.tools.plan.cost.machine import Machine
from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.tools.plan.cost.timeline import StepTime
from zpp_lab.tools.plan.search import limits
from zpp_lab.tools.plan.search.space import (
    BITS,
    PLAIN,
    Candidate,
    Knobs,
    Space,
    grads_part,
    named,
    unrotated,
    weights_part,
    wire_bits,
    without_bits,
    without_name,
)
from zpp_lab.train.memory.buffers import MOMENTS
from zpp_lab.train.memory.estimate import estimate

Figures = tuple[float, ...]
Say = Callable[[str], None]  # how far a search is, whenever that has changed


class Parts:
    """`measure`: figures of a whole config, each a sum as above; ValueError where it has none.

    `of` gives the same figures, by parts. A part's ValueError is that of every plan with it.
    """

    def __init__(self, base: Config, measure: Callable[[Config], Figures]) -> None:
        self.base, self.measure = base, measure
        self.ordered = replace(base, engine=replace(base.engine, ordered=True))  # ours, also raw
        self._recipes: dict[tuple[int, Knobs], tuple[RecipeConfig, Figures | ValueError]] = {}
        self._found: dict[str, Figures | ValueError] = {}
        self._added: dict[tuple[str, Knobs], Figures] = {}

    def of(self, candidate: Candidate) -> Figures:
        """Return figures of `candidate`; ValueError where a part has none."""
        parts = self._recipe(candidate), self._knobs(candidate)
        return tuple(a + b for a, b in zip(*parts, strict=True))

    def _recipe(self, candidate: Candidate) -> Figures:
        """With the reference's settings of memory; kept by the recipe's identity."""
        recipe, reference = candidate.recipe, _reference(candidate.knobs)
        known = self._recipes.get((id(recipe), reference))
        if known is None:
            try:
                found: Figures | ValueError = self._split(recipe, reference)
            except ValueError as error:
                found = error
            known = self._recipes[id(recipe), reference] = (recipe, found)
        return _value(known[1])

    def _split(self, recipe: RecipeConfig, reference: Knobs) -> Figures:
        if self._untouched(recipe):
            return self._whole(recipe, reference, self.base)
        same = ("name", "exempt", "rules", "stage", "shard", "order")  # errors say the name
        sharding = replace(recipe.sharding, update="weights")
        raw = RecipeConfig(sharding=sharding, **{name: getattr(recipe, name) for name in same})
        weights = RecipeConfig(name=recipe.name, **weights_part(recipe))
        grads = replace(raw, **grads_part(recipe))
        each = [self._whole(one, reference, self.ordered) for one in (weights, grads, raw)]
        return tuple(w + g - r for w, g, r in zip(*each, strict=True))

    def _knobs(self, candidate: Candidate) -> Figures:
        """What the other settings of memory add to the reference's."""
        cut = candidate.recipe.parts[2]
        key = cut, candidate.knobs
        if key not in self._added:
            raw = RecipeConfig(sharding=ShardingConfig(cut, cut, cut))
            reference = _reference(candidate.knobs)
            own = self._whole(raw, candidate.knobs, self.base)
            other = self._whole(raw, reference, self.base)
            self._added[key] = tuple(a - b for a, b in zip(own, other, strict=True))
        return self._added[key]

    def _whole(self, recipe: RecipeConfig, knobs: Knobs, base: Config) -> Figures:
        key = f"{weights_part(recipe)}{grads_part(recipe)}{knobs}{base is self.ordered}"
        if key not in self._found:
            try:
                self._found[key] = self.measure(Candidate(recipe, knobs).config(base))
            except ValueError as error:
                self._found[key] = error
        return _value(self._found[key])

    def _untouched(self, recipe: RecipeConfig) -> bool:
        if self.base.model.lora.on:  # a frozen base is ours to gather
            return False
        if min(wire_bits(recipe)) < 16:  # saves the longer way to the same answer
            return False
        made = Recipe(recipe, self.base.cluster.dp, lora=self.base.model.lora)
        return is_untouched(Plan((), made), self.base.engine.ordered)


def _reference(knobs: Knobs) -> Knobs:
    return Knobs(knobs.blocks_per_unit, knobs.checkpoint_activations)


def _value(found: Any) -> Figures:
    if isinstance(found, ValueError):
        raise found
    return found  # type: ignore[no-any-return]


TIE = 0.01  # of a step: predictions are not better than that
TRIES = 40
PROMISING = 0.98  # of the chosen plan's time: worth a study


@dataclass(frozen=True)
class Problem:
    """What to plan. link_gbps: of a node, None where nodes are joined as GPUs inside one are.
    device: a GPU's memory in bytes; assumed: nobody gave it, and no GPU is seen here.
    host: a rank's part of its host's memory, None where it is not known.
    limit: None where there is no study; then untested says whether wires may have fewer bits than
    `WireSpec.least_bits`. bits: to choose from."""

    base: Config
    machine: Machine
    link_gbps: float | None
    device: int
    limit: limits.LossLimit | None = None
    bits: tuple[int | None, ...] = BITS
    assumed: bool = False
    untested: bool = False
    host: int | None = None

    def over(self, option: Option) -> tuple[int, int]:
        """Return the bytes too many on the GPU and in host memory."""
        host = 0 if self.host is None else max(0, option.host - self.host)
        return max(0, option.peak - self.device), host

    def holds(self, option: Option) -> bool:
        return not any(self.over(option))

    @cached_property
    def space(self) -> Space:
        measured = self.limit.recipes if self.limit else []
        extra = [replace(PLAIN, name="zero3"), self.base.recipe, *measured]
        return Space(self.base, extra, self.limit is not None, self.bits)


@dataclass(frozen=True)
class Option:
    """A plan with its ruling, the bytes at its peak and in host memory, and for how many seconds at
    least the GPU, the host and both links are busy. `build`: equal for plans whose steps have the
    same tasks."""

    candidate: Candidate
    ruling: limits.Ruling
    peak: int
    host: int
    busy: Figures
    build: str

    @property
    def floor(self) -> float:
        return max(self.busy)

    def heavier(self, other: Option) -> bool:
        """Return whether no task can be shorter than in `other`, of the same build."""
        return all(map(le, other.wire_bits, self.wire_bits)) and all(map(le, other.busy, self.busy))

    @cached_property
    def wire_bits(self) -> tuple[int, ...]:
        return tuple(wire_bits(self.candidate.recipe))

    @property
    def gentle(self) -> tuple[float, int, int]:
        """Smaller is gentler: more bits on the wires and in the optimizer, then less memory."""
        state = limits.STATES.index(self.candidate.knobs.optimizer_state)
        return -sum(self.wire_bits) / len(self.wire_bits), state, self.peak


@dataclass(frozen=True)
class Timed:
    """A plan whose time was predicted."""

    option: Option
    time: StepTime

    @property
    def step_s(self) -> float:
        return self.time.step_s


@dataclass(frozen=True)
class Answer:
    """The chosen plan and what stands next to it. Lists are fastest first.

    plains: what torch does by itself, without codecs: the fastest of all that fit, ZeRO-3 and HSDP,
    or those that do not fit where none does. twin: the chosen plan's raw twin, where it has codecs.
    too_large, too_lossy, unmeasured: faster than the chosen plan, one a recipe. next_best: slower.
    promising: the unmeasured one with the most bits that is clearly faster.
    """

    problem: Problem
    chosen: Timed
    plains: Sequence[Timed]
    twin: Timed | None
    next_best: Sequence[Timed]
    too_large: Sequence[Timed]
    too_lossy: Sequence[Timed]
    unmeasured: Sequence[Timed]
    promising: Timed | None
    without_figures: Sequence[str]  # why some plans could not be predicted
    plans: int  # that were looked at
    predicted: int

    @property
    def plain(self) -> Timed:
        """The strongest."""
        return self.plains[0]

    def speed_up(self, timed: Timed) -> float:
        return self.plain.step_s / timed.step_s

    def fits(self, timed: Timed) -> bool:
        return self.problem.holds(timed.option)


class NothingFits(ValueError):
    """No plan that the loss limit allows fits; `closest` needs the least, `others` fit."""

    def __init__(self, closest: Option, others: int) -> None:
        super().__init__("no plan fits")
        self.closest, self.others = closest, others


def search(problem: Problem, listed: int = 3, say: Say = lambda _: None) -> Answer:
    """Return the fastest plan of `problem`'s space, and up to `listed` others of each kind.

    NothingFits where memory is too small; ValueError where nothing can be predicted.
    """
    return _Search(problem, say).answer(listed)


def options(problem: Problem, say: Say = lambda _: None) -> tuple[list[Option], list[str]]:
    """Return every plan of the space that has figures, and why others have none."""
    base = problem.base
    memory = Parts(base, partial(_held, vocab=vocabulary(base)))
    links = Parts(base, lambda config: _busy(_predicted(problem, config)))
    found: list[Option] = []
    faults: dict[str, None] = {}
    recipes, every = problem.space.recipes(), problem.space.knobs()
    total = len(recipes) * len(every)
    for looked, recipe in enumerate(recipes):
        say(f"memory and least time of {looked * len(every):,} of {total:,} plans")
        rule, bare = _rules(problem, recipe), without_bits(recipe)
        for knobs in every:
            candidate = Candidate(recipe, knobs)
            try:
                loads = links.of(candidate)  # first: it says at once what has no figures
                held = memory.of(candidate)
            except ValueError as error:
                faults[str(error)] = None
                continue
            ruling = rule[knobs.optimizer_state]
            build = f"{bare} {knobs.blocks_per_unit}"
            found.append(Option(candidate, ruling, *_memory(held), loads, build))
    if not found:
        raise ValueError(
            next(
                iter(faults), "no recipe runs with these settings; change the cluster or the model"
            )
        )
    return found, list(faults)


def _held(config: Config, vocab: int) -> Figures:
    """Return a rank's bytes in host memory, then those on its GPU at each moment."""
    found = estimate(plan_of(config), config, vocab)
    return found.host, *(found.at(moment) for moment in MOMENTS)


def _memory(held: Figures) -> tuple[int, int]:
    """Return an option's bytes at its peak and in host memory."""
    return int(max(held[1:])), int(held[0])


def _predicted(problem: Problem, config: Config) -> StepTime:
    return predict(config, problem.machine, problem.link_gbps)


def _busy(time: StepTime) -> Figures:
    return time.step_s - time.exposed_s, time.host_s, time.intra_s, time.inter_s


def _rules(problem: Problem, recipe: RecipeConfig) -> dict[str, limits.Ruling]:
    """By the optimizer's states."""
    if problem.limit is None:
        return dict.fromkeys(
            limits.STATES, limits.UNLIMITED if problem.untested else limits.without_evidence(recipe)
        )
    own = limits.Numbers.of(replace(problem.base, recipe=recipe))
    return {s: problem.limit.rule(replace(own, optimizer_state=s)) for s in limits.STATES}


class _Search:
    """One search: the options, and the times that were predicted."""

    def __init__(self, problem: Problem, say: Say) -> None:
        self.problem, self.say = problem, say
        self.options, self.faults = options(problem, say)
        self.times: dict[int, Timed] = {}
        self.by_build: dict[str, list[Timed]] = defaultdict(list)

    def answer(self, listed: int) -> Answer:
        fitting = [o for o in self.options if self.problem.holds(o)]
        allowed = [o for o in fitting if o.ruling.kind == "allowed"]
        if not allowed:
            within = [o for o in self.options if o.ruling.kind == "allowed"]
            closest = min(within, key=lambda o: (sum(self.problem.over(o)), o.peak, o.floor))
            raise NothingFits(closest, len(fitting))
        chosen, next_best = self._choose(allowed, listed)
        below = chosen.step_s

        def faster(kind: str) -> list[Timed]:
            those = [o for o in fitting if o.ruling.kind == kind]
            return self._quickest(_needed(those), listed, below)

        large = [
            o for o in self.options if o.ruling.kind == "allowed" and not self.problem.holds(o)
        ]
        unmeasured = faster("not measured")
        return Answer(
            problem=self.problem,
            chosen=chosen,
            plains=self._plains(),
            twin=self._twin(chosen),
            next_best=next_best,
            too_large=self._quickest(large, listed, below),
            too_lossy=faster("loss"),
            unmeasured=unmeasured,
            promising=self._promising(fitting, below * PROMISING),
            without_figures=self.faults,
            plans=len(self.options),
            predicted=len(self.times),
        )

    def _choose(self, allowed: Sequence[Option], listed: int) -> tuple[Timed, list[Timed]]:
        """The gentlest of those as fast as the fastest, and the quickest of other recipes. Of those
        that this list times one may be gentler still."""
        chosen = self._gentlest(allowed)
        while True:
            own = chosen.option.candidate.recipe
            others = [o for o in allowed if o.candidate.recipe is not own]
            next_best = self._quickest(others, listed)
            again = self._gentlest(allowed)
            if again is chosen:
                return chosen, next_best
            chosen = again

    def _gentlest(self, allowed: Sequence[Option]) -> Timed:
        limit = self._quickest(allowed, 1)[0].step_s * (1 + TIE)
        near = sorted((o for o in allowed if o.floor <= limit), key=lambda o: o.gentle)
        tried = [self._time(o) for o in near[:TRIES]]
        tried += [self.times[id(o)] for o in near[TRIES:] if id(o) in self.times]
        return next(t for t in tried if t.step_s <= limit)

    def _plains(self) -> list[Timed]:
        """The strongest plain plan, ZeRO-3 and HSDP, each at its fastest; fastest first."""
        own = [
            o
            for o in self.options
            if o.candidate.recipe.plain and o.candidate.knobs.optimizer_state == "fp32"
        ]
        there = [o for o in own if self.problem.holds(o)] or own
        found = self._quickest(there, 1)
        for name in ("zero3", "hsdp"):
            found += self._quickest((o for o in there if o.candidate.recipe.name == name), 1)
        once = {id(timed): timed for timed in found}
        return sorted(once.values(), key=lambda timed: timed.step_s)

    def _twin(self, chosen: Timed) -> Timed | None:
        """The raw twin, predicted if it is no option; None without codecs or figures."""
        recipe, knobs = chosen.option.candidate.recipe, chosen.option.candidate.knobs
        if not recipe.coded:
            return None
        candidate = Candidate(named(twin(recipe)), knobs)
        own = without_name(candidate.recipe)
        for option in self.options:
            same = option.candidate.knobs == knobs and not option.candidate.recipe.coded
            if same and without_name(option.candidate.recipe) == own:
                return self._time(option)
        base = self.problem.base
        config = candidate.config(base)
        try:
            time = _predicted(self.problem, config)
            held = _memory(_held(config, vocabulary(base)))
        except ValueError:
            return None
        return Timed(Option(candidate, limits.UNLIMITED, *held, _busy(time), ""), time)

    def _promising(self, fitting: Sequence[Option], below: float) -> Timed | None:
        those = [o for o in fitting if o.ruling.kind == "not measured" and o.floor < below]
        for option in sorted(_needed(those), key=lambda o: o.gentle)[:TRIES]:
            timed = self._time(option)
            if timed.step_s < below:
                return timed
        return None

    def _quickest(
        self, those: Iterable[Option], count: int, below: float = float("inf")
    ) -> list[Timed]:
        """The `count` fastest recipes among `those`, each with its fastest settings of memory,
        as far as they take less than `below` seconds."""
        best: dict[int, Timed] = {}
        for option in sorted(those, key=lambda o: o.floor):
            if option.floor >= below:
                break
            if any(
                option.heavier(t.option) for t in self.by_build[option.build] if t.step_s >= below
            ):
                continue
            timed = self._time(option)
            known = best.get(id(option.candidate.recipe))
            if timed.step_s < (known.step_s if known else below):
                best[id(option.candidate.recipe)] = timed
                if len(best) >= count:
                    below = sorted(t.step_s for t in best.values())[count - 1]
        return sorted(best.values(), key=lambda t: t.step_s)[:count]

    def _time(self, option: Option) -> Timed:
        if id(option) not in self.times:
            problem = self.problem
            config = option.candidate.config(problem.base)
            self.say(f"steps of {len(self.times):,} plans predicted")
            self.times[id(option)] = Timed(option, _predicted(problem, config))
            self.by_build[option.build].append(self.times[id(option)])
        return self.times[id(option)]


def _needed(those: Sequence[Option]) -> list[Option]:
    """What is worth a study: no rotated recipe whose unrotated twin is there too, which is no
    slower, and smaller optimizer states only where fp32 ones do not fit."""
    recipes = {id(o.candidate.recipe): o.candidate.recipe for o in those}
    names = {without_name(recipe) for recipe in recipes.values()}
    exact = {id(o.candidate.recipe) for o in those if o.candidate.knobs.optimizer_state == "fp32"}
    twins: dict[int, bool] = {}
    found = []
    for option in those:
        recipe = option.candidate.recipe
        if id(recipe) not in twins:
            twin = unrotated(recipe)
            twins[id(recipe)] = twin is not None and without_name(twin) in names
        smaller = option.candidate.knobs.optimizer_state != "fp32" and id(recipe) in exact
        if not twins[id(recipe)] and not smaller:
            found.append(option)
    return found
