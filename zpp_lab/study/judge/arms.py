"""Turns a folder of plain runs into a study: which runs belong to one arm, and its name.

Runs of one recipe whose settings differ in more than the seed are different arms;
their names then carry the settings that vary, such as "zero3 weights.bits=4".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zpp_lab.config.flat import arm_name, differing, flat_config, heeded, quantizes
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import Run

BASELINE = "zero3"
_QUESTION = "Which of these runs reach the same held-out loss as {baseline}?"


def study_of(name: str, runs: Sequence[Run]) -> tuple[StudyConfig, list[Run], list[str]]:
    """Return (a study that fits `runs`, the runs renamed to its arms, notes for the report)."""
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
        # A sweep names its arms by what it varied, and all runs here may vary more.
        recipe, *settings = run.arm.split(" ")
        of_sweep = recipe == run.recipe and all("=" in setting for setting in settings)
        by_name.setdefault(run.recipe if of_sweep else run.arm, []).append(run)
    return [r for name, group in by_name.items() for r in _split(name, group)]


def _split(name: str, group: list[Run]) -> list[Run]:
    """Give the runs of one recipe their own arm names where their settings vary."""
    flat = [heeded(run.config) for run in group]
    varying = {key for other in flat for key in differing(flat[0], other)}
    named = [arm_name(r.config, varying, None if name == r.recipe else name) for r in group]
    return [replace(run, arm=arm) for run, arm in zip(group, named, strict=True)]


def _factors(runs: Sequence[Run], arm: str) -> dict[str, Any]:
    """The recipe's settings that the runs vary, with this arm's levels: what a sweep swept."""
    flat = {run.arm: heeded(run.config) for run in runs}
    if arm not in flat:
        return {}
    first = next(iter(flat.values()))
    varying = sorted({key for other in flat.values() for key in differing(first, other)})
    own = (key for key in varying if key.startswith("recipe.") and key != "recipe.name")
    levels = {key: flat[arm].get(key) for key in own}
    return {k: v for k, v in levels.items() if v is None or isinstance(v, str | int | float)}


def _without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """One run for each arm and seed: a finished one if there is, else the first by path."""
    chosen: dict[tuple[str, int], Run] = {}
    notes = []
    for run in sorted(runs, key=lambda r: (r.outcome != "finished", str(r.dir))):
        first = chosen.setdefault((run.arm, run.seed), run)
        if first is not run:
            notes.append(f"{run.dir.name} repeats {first.dir.name} ({run.arm}, seed {run.seed}).")
    return list(chosen.values()), notes


def _baseline(runs: Sequence[Run]) -> str:
    """The arm whose recipe is plain ZeRO-3; the bare name when no arm or several are."""
    named = [run for run in runs if run.recipe == BASELINE]
    plain = {run.arm for run in named if not quantizes(flat_config(run.config))}
    return plain.pop() if len(plain) == 1 else BASELINE
