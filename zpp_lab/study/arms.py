"""Turns a folder of plain runs into a study: which runs belong to one arm, and its name.

Runs of one recipe whose settings differ in more than the seed are different arms;
their names then carry the settings that vary, such as "zero3 weights.bits=4".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zpp_lab.config import ArmConfig, Config, StudyConfig
from zpp_lab.runconfig import differing, flat_config
from zpp_lab.study.runs import Run

BASELINE = "zero3"
_NAME = "recipe.name"
_PLAIN = {k: v for k, v in flat_config(Config()).items() if k.startswith("recipe.")}
_WIRES = ("recipe.weights", "recipe.grads")  # and those of one direction or link
_QUESTION = "Which of these runs reach the same held-out loss as {baseline}?"


def study_of(name: str, runs: Sequence[Run]) -> tuple[StudyConfig, list[Run], list[str]]:
    """(a study that fits `runs`, the runs renamed to its arms, notes for the report)."""
    assert runs, "read_result has asked for some"
    named = _name_arms(runs)
    unique, notes = _without_repeats(named)
    arms = sorted({run.arm for run in unique})
    baseline = _baseline(unique)
    if baseline not in arms:
        notes.append(
            f"There is no {BASELINE} run to compare with: run the same settings and seeds with "
            f"recipe={BASELINE} into this folder."
        )
    order = [baseline, *(arm for arm in arms if arm != baseline)]
    study = StudyConfig(
        name=name,
        question=_QUESTION.format(baseline=baseline),
        arms=[ArmConfig(arm, factors=_factors(unique, arm)) for arm in order],
        seeds=sorted({run.seed for run in unique}),
        baseline=baseline,
    )
    return study, unique, notes


def _name_arms(runs: Sequence[Run]) -> list[Run]:
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.arm, []).append(run)
    return [r for name, group in by_name.items() for r in _split(name, group)]


def _split(name: str, group: list[Run]) -> list[Run]:
    """Give the runs of one recipe their own arm names where their settings vary."""
    flat = [_settings(run) for run in group]
    known = flat[:1]
    if name == BASELINE and any(map(_has_bits, group)):  # its name alone would say: no codec
        known.append(flat[0] | _PLAIN)
    varying = sorted({k for one in known for other in flat for k in differing(one, other)})
    varying = [key for key in varying if key != "seed"]

    def label(settings: dict) -> str:
        parts = [f"{k.removeprefix('recipe.')}={settings.get(k)}" for k in varying]
        return " ".join([name, *(p for p in parts if not p.endswith("=None"))])

    return [replace(run, arm=label(settings)) for run, settings in zip(group, flat, strict=True)]


def _factors(runs: Sequence[Run], arm: str) -> dict[str, Any]:
    """The recipe's settings that the runs vary, with this arm's levels: what a sweep swept."""
    flat = {run.arm: _settings(run) for run in runs}
    if arm not in flat:
        return {}
    first = next(iter(flat.values()))
    varying = sorted({key for other in flat.values() for key in differing(first, other)})
    levels = {k: flat[arm].get(k) for k in varying if k.startswith("recipe.") and k != _NAME}
    return {k: v for k, v in levels.items() if v is None or isinstance(v, str | int | float)}


def _without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """One run for each arm and seed: a finished one if there is, else the first by path."""
    kept: dict[tuple[str, int], Run] = {}
    notes = []
    for run in sorted(runs, key=lambda r: (r.outcome != "finished", str(r.dir))):
        first = kept.setdefault((run.arm, run.seed), run)
        if first is not run:
            notes.append(f"{run.dir.name} repeats {first.dir.name} ({run.arm}, seed {run.seed}).")
    return list(kept.values()), notes


def _baseline(runs: Sequence[Run]) -> str:
    """The arm whose recipe is plain ZeRO-3; the bare name when no arm or several are."""
    plain = {run.arm for run in runs if run.recipe == BASELINE and not _has_bits(run)}
    return plain.pop() if len(plain) == 1 else BASELINE


def _has_bits(run: Run) -> bool:
    return _sets(run, ".bits")


def _sets(run: Run, *fields: str) -> bool:
    return any(
        key.startswith("recipe.") and key.endswith(fields) and value is not None
        for key, value in flat_config(run.config).items()
    )


def _settings(run: Run) -> dict[str, Any]:
    """A run's settings without those that nothing heeds: a block of no codec. A sweep over bits
    that include null and over blocks has one baseline, not one for each block."""
    flat = flat_config(run.config)
    if _sets(run, ".bits", ".codec") or flat.get("recipe.rules"):
        return flat
    return {k: v for k, v in flat.items() if not k.startswith(_WIRES)} | {
        k: v for k, v in _PLAIN.items() if k.startswith(_WIRES)
    }
