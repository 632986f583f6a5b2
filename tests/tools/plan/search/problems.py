"""Small planning problems, and a finished study that allows 4-bit weights and no fewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.study.fake_runs import FakeArm, write_run
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import write_study
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.search.fastest import Problem
from zpp_lab.train.memory.buffers import GIB

GIVEN = ["train.param_dtype=bf16", "train.reduce_dtype=bf16", "train.batch_size=1"]
ARMS = (
    FakeArm("zero3", "no codec", 0.0),
    FakeArm("w4", "4-bit weights", 0.002, 0.001, 4),
    FakeArm("g4", "4-bit gradients", 0.018, 0.02, None, 4),  # undecided
    FakeArm("w2", "2-bit weights", 0.62, 0.03, 2),
)


def base(*overrides: str) -> Config:
    return compose([*GIVEN, "engine=fsdp", "cluster=2x2", *overrides])


def problem(*overrides: str, link: float | None = 5.0, gib: float = 80, **more: Any) -> Problem:
    """Where there is no study: of all bits."""
    more.setdefault("untested", more.get("limit") is None)
    return Problem(base(*overrides), load_machine("h200"), link, int(gib * GIB), **more)


def study(root: Path, arms: Sequence[FakeArm] = ARMS, seeds: int = 5, runs: bool = True) -> Path:
    """The study's folder, with `seeds` finished runs of every arm."""
    made = StudyConfig(
        name="fake",
        question="Which bits learn the same?",
        arms=[ArmConfig(a.name, [f"recipe={a.name}"], a.describe) for a in arms],
        seeds=list(range(1, seeds + 1)),
        overrides=["model=tiny", "train.steps=60"],
        margin=0.01,
    )
    root.mkdir()
    write_study(root, made)
    for arm in arms if runs else ():
        for seed in made.seeds:
            write_run(root / arm.name / f"seed{seed}", arm, seed, 60, made.name)
    return root
