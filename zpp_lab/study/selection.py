"""Some arms of a study alone: its controls before all the rest is paid for, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from zpp_lab.config import StudyConfig


def matching(study: StudyConfig, patterns: Sequence[str]) -> list[str]:
    """The names of the arms that match one of `patterns` (shell's * and ?). ValueError for a
    pattern that matches none."""
    names = [arm.name for arm in study.arms]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--arms {pattern}: no such arm; there are: {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def some_arms(study: StudyConfig, patterns: Sequence[str]) -> StudyConfig:
    """The study with the arms that match, the arms that these are compared with, and its
    baseline."""
    wanted = matching(study, patterns)
    against = {arm.against for arm in study.arms if arm.name in wanted}
    kept = {study.baseline, *wanted, *against}
    return replace(study, arms=[arm for arm in study.arms if arm.name in kept])
