"""Judged studies with few seeds: an order control, a negative control and arms between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.config.study import Role, StudyConfig
from zpp_lab.runs.reader import find_runs
from zpp_lab.study.judge.verdict import StudyResult, judge_study

ROLES: dict[str, Role] = {"zero3_reordered": "order_control", "broken": "negative_control"}
SOME = ("zero3", "zero3_reordered", "qsdp", "w4", "broken")


def seed_study(seeds: int, names: tuple[str, ...] = SOME) -> StudyConfig:
    study = fake_study(tuple(arm for arm in ARMS if arm.name in names), seeds)
    return replace(study, arms=[replace(a, role=ROLES.get(a.name, "arm")) for a in study.arms])


def judged(root: Path, seeds: int, names: tuple[str, ...] = SOME) -> StudyResult:
    study = seed_study(seeds, names)
    write_study_runs(root, study, steps=100)
    return judge_study(study, find_runs(root))


def with_gaps(result: StudyResult, gaps: dict[str, float]) -> StudyResult:
    """The same study of one seed with other final gaps."""
    runs = []
    for run in result.runs:
        assert run.summary is not None
        moved = 3.0 + gaps.get(run.arm, 0.0)
        runs.append(replace(run, summary={**run.summary, "heldout_loss": moved}))
    return judge_study(result.study, [run for run in runs if run.arm in ("zero3", *gaps)])
