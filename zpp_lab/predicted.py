"""What the cost model says of the arms that were measured, for the curves beside their points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zpp_lab.bench.step_engines import vocabulary
from zpp_lab.config import Config, load
from zpp_lab.cost.machine import Machine, load_machine
from zpp_lab.cost.step import predict
from zpp_lab.study.speed_results import BASE, Measured, Setting
from zpp_lab.study.speed_rows import Predicted

POINTS = 24  # of a curve, evenly spread over the logarithm of the bandwidth


def predictions(measured: Sequence[Measured], machine: str) -> tuple[list[Predicted], list[str]]:
    """(predictions, why others have none): at every measured link and between the outer ones.

    machine: a file of figures, or the name of one in conf/machine; ValueError where it is neither.
    Predicted are plain FSDP2 and the arms of this package's own engine, where nodes shared GPUs
    on GPUs shared alike.
    """
    figures = load_machine(machine)
    groups: dict[tuple[Setting, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.setting, one.arm), []).append(one)
    found: list[Predicted] = []
    faults: dict[str, None] = {}
    for (setting, arm), group in groups.items():
        try:
            found += _curve(setting, arm, group, figures.shared(setting.ranks_per_gpu))
        except ValueError as error:
            faults[f"{arm} has no prediction: {error}."] = None
    return found, list(faults)


def _curve(
    setting: Setting, arm: str, group: Sequence[Measured], machine: Machine
) -> list[Predicted]:
    one = group[0]
    if one.engine != "fsdp" and arm != BASE:
        raise ValueError("the cost model knows FSDP2 with its defaults and engine=fsdp alone")
    if one.config is None:
        raise ValueError("the table does not say its config")
    config = load(Config, one.config)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary(config)))
    links, own_loop = _links([m.gbps for m in group]), arm != BASE
    return [
        Predicted(setting, arm, link, predict(config, machine, link, own_loop).tokens_per_s)
        for link in links
    ]


def _links(measured: Sequence[float | None]) -> list[float | None]:
    """The measured bandwidths, rising, with points between them; None where there is no link."""
    known = sorted(gbps for gbps in measured if gbps is not None)
    links: list[float | None] = [None] if None in measured else []
    if not known:
        return links
    low, high = math.log(known[0]), math.log(known[-1])
    between = [math.exp(low + (high - low) * i / POINTS) for i in range(1, POINTS)]
    return [*links, *sorted({*known, *between})]
