"""How a run is shown in wandb: its group, job type, name, tags and config.

The stock pages of wandb group, filter and colour by these, so a sweep is readable there
before anyone has made a chart. Plain mappings, as folders of older versions are sent too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zpp_lab.config import WIRES
from zpp_lab.tracking.folder import RunFolder

RAW = "raw"  # the tensor's own bytes
_TAG = 64  # characters that a tag may have
_NOT_SHOWN = ("tracking", "run", "seed")  # where and how a run was watched changes no numbers


def identity(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """wandb.init's arguments that say which run this is: group = study, job type = arm."""
    run, tracking = _section(config, "run"), _section(config, "tracking")
    arm, seed = arm_of(config), config.get("seed")
    return {
        "id": folder.state()["id"],
        "name": run.get("name") or (f"{arm}-seed{seed}" if run.get("arm") else folder.path.name),
        "project": tracking.get("project", "zpp_lab"),
        "entity": tracking.get("entity"),
        "group": tracking.get("group") or run.get("study") or _sweep(folder, run),
        "job_type": arm,
        "tags": tags(config),
    }


def arm_of(config: Mapping[str, Any]) -> str | None:
    return _section(config, "run").get("arm") or _section(config, "recipe").get("name")


def tags(config: Mapping[str, Any]) -> list[str]:
    """The user's own, then recipe, bits of weights and gradients, cluster and engine."""
    recipe = _section(config, "recipe")
    cluster, engine = _section(config, "cluster"), _section(config, "engine")
    sent = {wire: codec_label(recipe, wire) for wire in WIRES}
    named = {
        "recipe": recipe.get("name"),
        "weights": _pair(sent["weights_forward"], sent["weights_backward"]),
        "grads": _pair(sent["grads_intra"], sent["grads_inter"]),
        "cluster": f"{cluster.get('nodes')}x{cluster.get('gpus_per_node')}" if cluster else None,
        "engine": engine.get("name"),
    }
    own = _section(config, "tracking").get("tags") or []
    return [*own, *(f"{key}={value}"[:_TAG] for key, value in named.items() if value)]


def codec_label(recipe: Mapping[str, Any], wire: str) -> str:
    """What a wire carries: bits such as "4", an outside codec's name, or "raw"."""
    codec, bits = _setting(recipe, wire, "codec"), _setting(recipe, wire, "bits")
    if codec not in (None, "block", "none"):
        return str(codec)
    return str(bits) if bits else RAW


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config for tables, filters and parallel coordinates.

    Sections stay nested, which wandb shows as recipe.weights.bits; settings left at null, where
    a run was put and how it was watched are dropped. `study`, `arm` and `seed` come first;
    `wires` says what each wire carries, short-hands resolved; `bits` the same as numbers.
    """
    recipe = _section(config, "recipe")
    labels = {wire: codec_label(recipe, wire) for wire in WIRES}
    first = {
        "study": _section(config, "run").get("study"),
        "arm": arm_of(config),
        "seed": config.get("seed"),
        "wires": labels,
        "bits": {wire: int(label) for wire, label in labels.items() if label.isdigit()},
    }
    rest = {key: value for key, value in config.items() if key not in _NOT_SHOWN}
    return _without_nothing({**first, **rest})


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}


def _setting(recipe: Mapping[str, Any], wire: str, key: str) -> Any:
    """A wire's own setting, else its short-hand's."""
    short = "weights" if wire.startswith("weights") else "grads"
    own = _section(recipe, wire).get(key)
    return _section(recipe, short).get(key) if own is None else own


def _pair(one: str, other: str) -> str:
    return one if one == other else f"{one}+{other}"


def _sweep(folder: RunFolder, run: Mapping[str, Any]) -> str | None:
    """The sweep's folder for a job of `zpp-lab train -m`, which names folder and run itself."""
    return folder.path.parent.parent.name if run.get("dir") and run.get("name") else None


def _without_nothing(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept = {key: _without_nothing(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in (None, {}, [])}
