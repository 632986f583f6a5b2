"""Plans as words for the command line, in Hydra's grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zpp_lab.config import Config, RecipeConfig
from zpp_lab.hydra_words import written
from zpp_lab.search.space import PLAIN, Candidate, named_recipes


def plan_overrides(given: Sequence[str], config: Config, candidate: Candidate) -> list[str]:
    """All that `zpp-lab train` needs: `given` without what the plan replaces, then the plan, which
    runs as real processes. config: what `given` composes to."""
    own = ["engine=fsdp", *recipe_overrides(candidate.recipe), *_knobs(config, candidate)]
    replaced = {_key(word) for word in own} | {"engine.name"}
    kept = [w for w in given if _key(w) not in replaced and not _key(w).startswith("recipe.")]
    return [*kept, *own]


def recipe_overrides(recipe: RecipeConfig) -> list[str]:
    """`recipe=NAME` for one of conf/recipe, else every setting that differs from recipe=base."""
    if recipe in named_recipes():
        return [f"recipe={recipe.name}"]
    own, usual = _flat(recipe), _flat(PLAIN)
    changed = [f"recipe.{key}={written(own[key])}" for key in own if own[key] != usual.get(key)]
    name = f"recipe.name={written(recipe.name)}"
    return ["recipe=base", name, *(word for word in changed if word != name)]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _flat(recipe: RecipeConfig) -> dict[str, Any]:
    """Settings by dotted name, two deep: lists and a codec's options stay whole."""
    flat: dict[str, Any] = {}
    for key, value in asdict(recipe).items():  # type: ignore[call-overload]
        inner = value if isinstance(value, dict) else {None: value}
        flat |= {f"{key}.{k}" if k else key: v for k, v in inner.items()}
    return flat


def _knobs(config: Config, candidate: Candidate) -> list[str]:
    knobs = candidate.knobs
    wanted = {
        "model.checkpoint_activations": (
            config.model.checkpoint_activations,
            knobs.checkpoint_activations,
        ),
        "model.loss_chunk": (config.model.loss_chunk, knobs.loss_chunk),
        "train.optimizer_state": (config.train.optimizer_state, knobs.optimizer_state),
    }
    return [f"{key}={written(now)}" for key, (was, now) in wanted.items() if was != now]
