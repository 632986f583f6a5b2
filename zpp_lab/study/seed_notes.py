"""Sentences on the seeds of an arm that could not be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zpp_lab.config import StudyConfig
from zpp_lab.study.states import told

if TYPE_CHECKING:
    from zpp_lab.study.verdict import ArmResult


def seed_notes(study: StudyConfig, result: ArmResult) -> list[str]:
    """Sentences on the runs that have not finished: which, how far they came, and why not. Seeds
    of one fate share one."""
    fates: dict[str, list[int]] = {}
    for seed in sorted({*study.seeds, *result.runs}):
        run = result.runs.get(seed)
        if run is None or run.outcome != "finished":
            fates.setdefault(told(run), []).append(seed)
    return [_sentence(result, seeds) for seeds in fates.values()]


def _sentence(result: ArmResult, seeds: list[int]) -> str:
    several = len(seeds) > 1
    named = f"{'seeds' if several else 'seed'} {', '.join(map(str, seeds))}"
    return f"{result.name}: {named} {told(result.runs.get(seeds[0]), several)}."
