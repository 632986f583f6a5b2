"""Arms written as a grid: `factors` in a study's YAML file becomes one arm a combination.

    - name: "w{weights.bits}_b{block}_{exempt}"
      overrides: ["recipe.weights.block_size={block}", "recipe.grads.block_size={block}"]
      factors:
        recipe.weights.bits: [8, 4]           # a setting: key=level is the override
        block: [64, 256]                      # any other name: an override uses its level,
        exempt:                               # or each level brings overrides of its own
          norms: [recipe.exempt.max_ndim=1]
          none: [recipe.exempt.max_ndim=0]

`name`, `describe`, `against`, `start` and overrides may hold the level of a factor, called
by its key or by the end of it. A level of null reads "raw". The expanded arms remember their
levels, for the plots.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from zpp_lab.config.load import written
from zpp_lab.config.schema import Config

Values = dict[str, Any]
_SETTINGS = {f.name for f in fields(Config)}  # type: ignore[arg-type]
_TEMPLATES = ("name", "describe", "against", "start")
_PLACE = re.compile(r"\{([\w.]+)\}")


def expand_arms(arms: Any) -> Any:
    """Expand each grid among the arms of a study's YAML file into its combinations, in order.
    Anything but a list of mappings is returned unchanged: `config.load` explains it. ValueError for
    a factor without levels and for a name that does not contain every factor."""
    if not isinstance(arms, list) or not all(isinstance(arm, Mapping) for arm in arms):
        return arms
    return [made for arm in arms for made in _expand(dict(arm))]


def _expand(arm: Values) -> list[Values]:
    name, factors = arm.get("name"), arm.get("factors")
    if not factors or not isinstance(name, str):
        return [arm]
    if not isinstance(factors, Mapping):
        raise ValueError(f"arm {name}: factors: use a mapping from a factor's name to its levels")
    used = {place for o in arm.get("overrides") or [] for place in _PLACE.findall(str(o))}
    choices = [list(_levels(name, str(key), levels, used)) for key, levels in factors.items()]
    keys = [str(key) for key in factors]
    made = [_arm(arm, dict(zip(keys, c, strict=True))) for c in itertools.product(*choices)]
    names = [one["name"] for one in made]
    if len(set(names)) < len(names):
        places = ", ".join(f"{{{key}}}" for key in keys)
        raise ValueError(
            f"arm {name}: its name must contain every factor with levels; add {places}"
        )
    return made


def _levels(arm: str, key: str, levels: Any, used: set[str]) -> Iterator[tuple[Any, list[str]]]:
    """(level, its overrides) for each level of one factor."""
    setting = key.split(".")[0] in _SETTINGS
    if isinstance(levels, Mapping) and levels:
        for level, overrides in levels.items():
            yield level, [overrides] if isinstance(overrides, str) else list(overrides or [])
    elif isinstance(levels, list) and levels and (setting or key in used):
        for level in levels:
            yield level, [f"{key}={_text(level)}"] if setting else []
    elif isinstance(levels, str | int | float | bool | None):
        # One level: the arm's place in a grid of others. A name without a setting is a label.
        yield levels, [f"{key}={_text(levels)}"] if setting else []
    else:
        raise ValueError(
            f"arm {arm}, factor {key}: give a list of levels for a setting (such as "
            f"recipe.weights.bits: [8, 4]); for an own name a list and overrides with {{{key}}}, "
            f"or a mapping to overrides; settings start with {', '.join(sorted(_SETTINGS))}"
        )


def _arm(arm: Values, chosen: dict[str, tuple[Any, list[str]]]) -> Values:
    levels = {key: level for key, (level, _) in chosen.items()}
    overrides: list[str] = []
    for given in (arm.get("overrides") or [], *(more for _, more in chosen.values())):
        filled = [_fill(arm["name"], str(override), levels) for override in given]
        overrides += [o for o in filled if o not in overrides]
    texts = {
        field: _fill(arm["name"], str(arm[field]), levels)
        for field in _TEMPLATES
        if arm.get(field) is not None
    }
    return {**arm, **texts, "overrides": overrides, "factors": levels}


def _fill(arm: str, text: str, levels: Mapping[str, Any]) -> str:
    def level(match: re.Match[str]) -> str:
        asked = match[1]
        found = [k for k in levels if k == asked or k.endswith(f".{asked}")]
        if len(found) != 1:
            raise ValueError(
                f"arm {arm}: {{{asked}}} names {len(found)} factors; valid: {', '.join(levels)}"
            )
        return "raw" if levels[found[0]] is None else _text(levels[found[0]])

    return _PLACE.sub(level, text)


def _text(level: Any) -> str:
    """Write a level as in overrides and names; a string is Hydra's own notation, such as [2,4]."""
    return level if isinstance(level, str) else written(level)
