"""Some arms of a study alone: its controls before all the rest is paid for, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from zpp_lab.config import StudyConfig


def some_arms(study: StudyConfig, patterns: Sequence[str]) -> StudyConfig:
    """The study with the arms that match one of `patterns` (shell's * and ?), the arms that these
    are compared with, and its baseline. ValueError for a pattern that matches none."""
    names = [arm.name for arm in study.arms]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--arms {pattern}: no such arm; there are: {', '.join(names)}")
    wanted = [arm for arm in study.arms if any(fnmatchcase(arm.name, p) for p in patterns)]
    kept = {study.baseline} | {n for arm in wanted for n in (arm.name, arm.against) if n}
    return replace(study, arms=[arm for arm in study.arms if arm.name in kept])
