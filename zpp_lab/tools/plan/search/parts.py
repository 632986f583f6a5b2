"""Figures of thousands of plans from those of a hundred, for what adds up over a plan's parts.

Memory at a moment, and the seconds that a link or the GPU is busy, are sums of a term of the
weights' part, one of the gradients' part and one of the settings of memory. So each part is
measured once beside raw reference parts, and a plan is weights + gradients + settings - 2 ×
reference. Recomputed activations change what is gathered ahead, so there is a reference with them
and one without. What FSDP2 runs by itself has other terms and is measured whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.recipe import ShardingConfig
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.engines.units import is_untouched
from zpp_lab.tools.plan.search.space import Candidate, Knobs, grads_part, weights_part, wire_bits

Figures = tuple[float, ...]


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
        """Figures of `candidate`; ValueError where a part has none."""
        return _sum(self._recipe(candidate), self._knobs(candidate))

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
        same = ("exempt", "rules", "stage", "shard", "order")
        sharding = replace(recipe.sharding, update="weights")
        raw = RecipeConfig(sharding=sharding, **{name: getattr(recipe, name) for name in same})
        weights = RecipeConfig(**weights_part(recipe))
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
            self._added[key] = _difference(own, self._whole(raw, reference, self.base))
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
        made = Recipe(recipe, self.base.cluster, lora=self.base.model.lora)
        return is_untouched(Plan((), made), self.base.engine.ordered)


def _reference(knobs: Knobs) -> Knobs:
    return Knobs(checkpoint_activations=knobs.checkpoint_activations)


def _value(found: Any) -> Figures:
    if isinstance(found, ValueError):
        raise found
    return found  # type: ignore[no-any-return]


def _sum(one: Figures, other: Figures) -> Figures:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _difference(one: Figures, other: Figures) -> Figures:
    return tuple(a - b for a, b in zip(one, other, strict=True))
