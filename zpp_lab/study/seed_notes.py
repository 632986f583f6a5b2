"""Sentences on the seeds of an arm that could not be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zpp_lab.config import StudyConfig

if TYPE_CHECKING:
    from zpp_lab.study.verdict import ArmResult


def seed_notes(study: StudyConfig, result: ArmResult) -> list[str]:
    """Sentences on the seeds that could not be used; seeds of one fate share one."""
    words = {"unfinished": "has not finished", "out_of_memory": "ran out of memory"}
    fates: dict[str, list[int]] = {}
    for seed in sorted({*study.seeds, *result.runs}):
        run = result.runs.get(seed)
        outcome = run.outcome if run else "unfinished"
        if outcome != "finished":
            error = _first_line(run.failure["error"]) if run and run.failure else ""
            fate = words.get(outcome, outcome) + (f" ({error})" if error else "")
            fates.setdefault(fate, []).append(seed)
    return [
        f"{result.name}: {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{', '.join(map(str, seeds))} {_plural(fate, len(seeds))}."
        for fate, seeds in fates.items()
    ]


def _plural(fate: str, count: int) -> str:
    return fate if count == 1 else fate.replace("has not", "have not")


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else ""
