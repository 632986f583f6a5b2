"""What wandb gets of a record: flat names, histograms of errors, and results for tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zpp_lab.tracking.baseline import Baseline
from zpp_lab.tracking.jsonl import Record

HISTOGRAM = {"counts", "edges"}  # the keys of a histogram in telemetry
_CLASSES_MEASURE = "nmse"  # shown over the parameter classes of a wire


def row(record: Record) -> dict[str, Any]:
    """A step's record with names such as bytes/weights_forward/inter.

    Telemetry's {"counts": [...], "edges": [...]} become wandb histograms, and for each wire
    telemetry/<wire>/nmse_by_class is the histogram of log10(nmse) over parameter classes.
    """
    values = dict(flat(record))
    for wire, kinds in (record.get("telemetry") or {}).items():
        spread = _spread(kinds)
        if len(spread) > 1:
            values[f"telemetry/{wire}/{_CLASSES_MEASURE}_by_class"] = _histogram(spread)
    return values


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by slashes."""
    for key, value in record.items():
        if isinstance(value, Mapping) and set(value) == HISTOGRAM:
            yield f"{prefix}{key}", _counted(value["counts"], value["edges"])
        elif isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def outcome_values(outcome: Mapping[str, Any], baseline: Baseline | None) -> dict[str, Any]:
    """What decides a verdict, one number a run: gap, shares of the baseline's bytes, speed."""
    values: dict[str, Any] = {}
    if outcome.get("seconds") and outcome.get("tokens"):
        values["final/tokens_per_second"] = outcome["tokens"] / outcome["seconds"]
    theirs = baseline.folder.outcome() if baseline is not None else None
    if baseline is None or theirs is None:
        return values
    if "heldout_loss" in outcome and "heldout_loss" in theirs:
        gap = outcome["heldout_loss"] - theirs["heldout_loss"]
        values[f"final/{baseline.prefix}"] = gap
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
