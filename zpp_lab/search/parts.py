"""Figures of thousands of plans from those of a hundred, for what adds up over a plan's parts.

Memory at a moment, and the seconds that a link or the GPU is busy, are sums of a term of the
weights' part, one of the gradients' part and one of the settings of memory. So each part is
measured once beside raw reference parts, and a plan is weights + gradients + settings - 2 ×
reference. What FSDP2 runs by itself has other terms and is measured whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zpp_lab.config import Config, RecipeConfig
from zpp_lab.engines.fsdp_wrap import is_untouched
from zpp_lab.plan import Plan
from zpp_lab.recipe import Recipe
from zpp_lab.search.space import Candidate, Knobs, grads_part, weights_part, wire_bits

Figures = tuple[float, ...]
REFERENCE = Knobs()


class Parts:
    """`measure`: figures of a whole config, each a sum as above; ValueError where it has none.

    `of` gives the same figures, by parts. A part's ValueError is that of every plan with it.
    """

    def __init__(self, base: Config, measure: Callable[[Config], Figures]) -> None:
        self.base, self.measure = base, measure
        self._recipes: dict[int, tuple[RecipeConfig, Figures | ValueError]] = {}
        self._found: dict[str, Figures | ValueError] = {}
        self._added: dict[tuple[str, Knobs], Figures] = {}

    def of(self, candidate: Candidate) -> Figures:
        """Figures of `candidate`; ValueError where a part has none."""
        return _sum(self._recipe(candidate.recipe), self._knobs(candidate))

    def _recipe(self, recipe: RecipeConfig) -> Figures:
        """With the reference's settings of memory; kept by the recipe's identity."""
        known = self._recipes.get(id(recipe))
        if known is None:
            try:
                found: Figures | ValueError = self._split(recipe)
            except ValueError as error:
                found = error
            known = self._recipes[id(recipe)] = (recipe, found)
        return _value(known[1])

    def _split(self, recipe: RecipeConfig) -> Figures:
        if self._untouched(recipe):
            return self._whole(recipe, REFERENCE)
        # in reversed order, which costs the same but is never FSDP2's own
        raw = RecipeConfig(
            exempt=recipe.exempt, rules=recipe.rules, stage=recipe.stage, order="reversed"
        )
        weights = RecipeConfig(**weights_part(recipe) | {"order": "reversed"})
        grads = replace(raw, **grads_part(recipe) | {"order": "reversed"})
        each = [self._whole(one, REFERENCE) for one in (weights, grads, raw)]
        return tuple(w + g - r for w, g, r in zip(*each, strict=True))

    def _knobs(self, candidate: Candidate) -> Figures:
        """What the settings of memory add to the reference's."""
        key = candidate.recipe.shard, candidate.knobs
        if key not in self._added:
            raw = RecipeConfig(shard=candidate.recipe.shard)
            own = self._whole(raw, candidate.knobs)
            self._added[key] = _difference(own, self._whole(raw, REFERENCE))
        return self._added[key]

    def _whole(self, recipe: RecipeConfig, knobs: Knobs) -> Figures:
        key = f"{weights_part(recipe)}{grads_part(recipe)}{knobs}"
        if key not in self._found:
            try:
                self._found[key] = self.measure(Candidate(recipe, knobs).config(self.base))
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


def _value(found: Any) -> Figures:
    if isinstance(found, ValueError):
        raise found
    return found  # type: ignore[no-any-return]


def _sum(one: Figures, other: Figures) -> Figures:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _difference(one: Figures, other: Figures) -> Figures:
    return tuple(a - b for a, b in zip(one, other, strict=True))
