"""Configs as flat dotted keys, to compare two runs or to show how arms differ.

The rule for what may differ is the trainer's own, so that a study never starts a
run in a folder where the trainer would refuse to go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zpp_lab.config import Config
from zpp_lab.runconfig import FREE, differing, flat_config


def differences(
    one: Config | Mapping[str, Any], other: Config | Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ and change numbers → (value in one, value in other), by key."""
    a, b = flat_config(one), flat_config(other)
    return {key: (a.get(key), b.get(key)) for key in differing(a, b)}


def fingerprint(config: Config) -> str:
    """The settings that change numbers, apart from the seed and the recipe's name, as one text:
    two arms with the same one would train the same."""
    own = {*FREE, "seed", "recipe.name"}
    kept = {k: v for k, v in flat_config(config).items() if not own & _parents(k)}
    return json.dumps(kept, sort_keys=True, default=str)


def _parents(key: str) -> set[str]:
    parts = key.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
