"""What wandb gets of a run: its group, job type, name, tags and config, and its records.

The stock pages of wandb group, filter and colour by these, so a sweep is readable there
before anyone has made a chart. Records become flat names, histograms of errors, and results for
tables. All are plain mappings, as folders of older versions are sent too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from zpp_lab.config.flat import (
    DERIVED,
    RAW,
    arm_name,
    arm_of,
    every_setting,
    run_name,
    stored_config,
    within,
)
from zpp_lab.config.wires import WIRES, Wire
from zpp_lab.runs.metrics import Record
from zpp_lab.runs.wandb.baseline import Baseline
from zpp_lab.runs.wandb.folder import RunFolder

_TAG = 64  # characters that a tag may have, in wandb
_NOT_SHOWN = ("tracking", "run", "seed")  # where and how a run was watched changes no numbers
_BY_KIND = sorted(
    WIRES.values(), key=lambda spec: ("weights", "gradients", "activations").index(spec.carries)
)
_TAGS = tuple(dict.fromkeys(spec.tag for spec in _BY_KIND))  # in this order
MADE_WITH = ("machine", "versions", "commit", "commits", "data")  # of an outcome: words
_NAMES = ("study", "arm", "recipe", "seed", "cluster")  # of an outcome: in the config already
SHOWN = {  # series that have a panel of their own in wandb → their names there
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "heldout_loss": "val/loss",
    "heldout_accuracy": "val/accuracy",
}
BYTES = "train/bytes"  # of a step, all wires and ranks
BY_CLASS = "nmse_by_class"  # below telemetry/WIRE
HISTOGRAM = {"counts", "edges"}  # the keys of a histogram in telemetry
Histogram = Callable[[list[float], list[float]], Any]  # of counts and edges
Spread = Callable[[list[float]], Any]  # of values
_CLASSES_MEASURE = "nmse"  # shown over the parameter classes of a wire


def identity(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return wandb.init's arguments that say which run this is: group = study, job type = arm."""
    run, tracking = _section(config, "run"), _section(config, "tracking")
    return {
        "id": folder.state()["id"],
        "name": run_name(config),
        "project": project_of(tracking, folder.state().get("project")),
        "entity": tracking.get("entity"),
        "group": tracking.get("group") or run.get("study") or _sweep(folder, run),
        "job_type": arm_of(config),
        "tags": tags(config),
    }


def project_of(tracking: Mapping[str, Any], sent_to: str | None = None) -> str:
    """Return the settings' project, the one it was sent to, WANDB_PROJECT's, or zpp_lab."""
    return tracking.get("project") or sent_to or os.environ.get("WANDB_PROJECT") or "zpp_lab"


def own_tags(tracking: Mapping[str, Any]) -> list[str]:
    """Return the settings' tags; without any WANDB_TAGS'."""
    named = os.environ.get("WANDB_TAGS", "").split(",")
    return list(tracking.get("tags") or [tag.strip() for tag in named if tag.strip()])


def tags(config: Mapping[str, Any]) -> list[str]:
    """Return the user's own, then recipe, bits of weights and gradients, cluster and engine."""
    cluster, engine = _section(config, "cluster"), _section(config, "engine")
    sent: dict[str, list[str]] = {}
    for wire, label in codec_labels(config).items():
        sent.setdefault(WIRES[wire].tag, []).append(label)
    named = {
        "recipe": arm_name(config),  # as it is: a baseline's tag on 4 bits would mislead
        **{tag: "+".join(dict.fromkeys(sent[tag])) for tag in _TAGS if tag in sent},
        "cluster": _shape(cluster) if cluster else None,
        "engine": engine.get("name"),
    }
    own = own_tags(_section(config, "tracking"))
    return [*own, *(within(_TAG, f"{key}={value}") for key, value in named.items() if value)]


def _shape(cluster: Mapping[str, Any]) -> str:
    """Name a cluster: "1x4", with two tensor parts and two stages "1x4 tp2 pp2"."""
    split = [f" {axis}{cluster[axis]}" for axis in ("tp", "pp") if cluster.get(axis, 1) > 1]
    return f"{cluster.get('nodes')}x{cluster.get('gpus_per_node')}{''.join(split)}"


def codec_labels(config: Mapping[str, Any]) -> dict[Wire, str]:
    """Return what each wire carries: bits such as "4", a codec's name, or "raw". Where rules give
    some parameters another codec, all that it carries: "raw/4"; in phases, one after another:
    "8>4".

    As the run's config.yaml records it; older ones have settings alone.
    """
    record = config[DERIVED] if DERIVED in config else every_setting(stored_config(config))[DERIVED]
    first = {wire: sent for wire, sent in record.items() if wire in WIRES}
    phases = [first, *(own for name, own in record.items() if name not in first)]
    return {
        wire: ">".join(label for label, _ in groupby(_label(own[wire]) for own in phases))
        for wire in first
    }


def _label(sent: Mapping[str, Any]) -> str:
    """Of one wire in one phase."""
    codecs = [sent, *sent.get("rules", ())]
    return "/".join(dict.fromkeys(map(_codec_label, codecs)))


def _codec_label(sent: Mapping[str, Any]) -> str:
    codec, bits = sent["codec"], sent.get("bits")
    if codec == "block":
        return str(bits)
    return RAW if codec == "none" else f"normal{bits}" if codec == "normal" else str(codec)


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for tables, filters and parallel coordinates.

    Sections stay nested, which wandb shows as recipe.weights.bits; settings left at null, where
    a run was put and how it was watched are dropped. `study`, `arm` and `seed` come first;
    `wires` says what each wire carries, short-hands and rules resolved; `bits` the same as numbers,
    of wires that have one.
    """
    labels = codec_labels(config)
    first = {
        "study": _section(config, "run").get("study"),
        "arm": arm_of(config),
        "seed": config.get("seed"),
        "wires": labels,
        "bits": {
            wire: int(own)
            for wire, label in labels.items()
            if (own := label.removeprefix("normal")).isdigit()
        },
    }
    rest = {key: value for key, value in config.items() if key not in (*_NOT_SHOWN, DERIVED)}
    return _without_nothing({**first, **rest})


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}


def _sweep(folder: RunFolder, run: Mapping[str, Any]) -> str | None:
    """The sweep's folder for a job of `zpp-lab train -m`, which names folder and arm."""
    named = run.get("arm") or run.get("name")
    return folder.path.parent.parent.name if run.get("dir") and named else None


def _without_nothing(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    chosen = {key: _without_nothing(item) for key, item in value.items()}
    return {key: item for key, item in chosen.items() if item not in (None, {}, [])}


def row(
    record: Record, counted: Histogram | None = None, spread: Spread | None = None
) -> dict[str, Any]:
    """Return a step's record with names such as bytes/weights_forward/inter, and again with those
    of `SHOWN`, by which other programs' runs can be compared.

    Telemetry's {"counts": [...], "edges": [...]} become histograms, and for each wire
    telemetry/<wire>/nmse_by_class is the histogram of log10(nmse) over parameter classes. These
    are wandb's, unless `counted` and `spread` make others of counts and of values.
    """
    values = dict(flat(record, counted=counted))
    values |= {name: values[key] for key, name in SHOWN.items() if key in values}
    if record.get("bytes"):
        values[BYTES] = sum(n for hops in record["bytes"].values() for n in hops.values())
    for wire, kinds in (record.get("telemetry") or {}).items():
        errors = _spread(kinds)
        if len(errors) > 1:
            made = (spread or _histogram)(errors)
            values[f"telemetry/{wire}/{BY_CLASS}"] = made
    return values


def results(outcome: Mapping[str, Any], counted: Histogram | None = None) -> dict[str, Any]:
    """Return what a run came to, below final/: plain names are the last step's."""
    known = (*MADE_WITH, *_NAMES)
    left = {key: value for key, value in outcome.items() if key not in known}
    return dict(flat(left, "final/", counted))


def flat(
    record: Mapping[str, Any], prefix: str = "", counted: Histogram | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield nested names joined by slashes."""
    for key, value in record.items():
        if isinstance(value, Mapping) and set(value) == HISTOGRAM:
            yield f"{prefix}{key}", (counted or _counted)(value["counts"], value["edges"])
        elif isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/", counted)
        else:
            yield f"{prefix}{key}", value


def outcome_values(outcome: Mapping[str, Any], baseline: Baseline | None) -> dict[str, Any]:
    """Return what decides a verdict: gap, shares of the baseline's bytes, speed."""
    values: dict[str, Any] = {}
    if outcome.get("seconds") and outcome.get("tokens"):
        values["final/tokens_per_second"] = outcome["tokens"] / outcome["seconds"]
    theirs = baseline.folder.outcome() if baseline is not None else None
    if baseline is None or theirs is None:
        return values
    own, other = (o.get("heldout_loss") for o in (outcome, theirs))
    if own is not None and other is not None:
        values[f"final/{baseline.prefix}"] = own - other
    for name, hops in (("bytes_share", ("intra", "inter")), ("bytes_share_inter", ("inter",))):
        own, other = (_bytes_of_a_step(o, hops) for o in (outcome, theirs))
        if own is not None and other:
            values[f"final/{name}"] = own / other
    return values


def _bytes_of_a_step(outcome: Mapping[str, Any], hops: tuple[str, ...]) -> float | None:
    wires, steps = outcome.get("bytes"), outcome.get("steps")
    if not wires or not steps:
        return None
    return sum(wire.get(hop, 0) for wire in wires.values() for hop in hops) / steps


def _spread(kinds: Mapping[str, Any]) -> list[float]:
    """log10 of the classes' errors, those that have one."""
    found = [figures.get(_CLASSES_MEASURE) for figures in kinds.values()]
    return [math.log10(value) for value in found if value and 0 < value < math.inf]


def _histogram(values: list[float]) -> Any:
    import wandb

    return wandb.Histogram(values, num_bins=min(32, 4 * len(values)))


def _counted(counts: list[float], edges: list[float]) -> Any:
    import wandb

    return wandb.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))
