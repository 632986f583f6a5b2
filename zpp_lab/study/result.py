"""From a folder to its verdicts, for whoever wants them without a report."""

from __future__ import annotations

from pathlib import Path

from zpp_lab.config import StudyConfig
from zpp_lab.study.arms import study_of
from zpp_lab.study.runs import find_runs, read_study
from zpp_lab.study.verdict import StudyResult, judge_study


def read_result(root: Path, study: StudyConfig | None = None) -> StudyResult:
    """The verdicts of the runs at and below `root`.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    Raises ValueError when there are no runs or one cannot be read.
    """
    runs = find_runs(root)
    study = study or read_study(root)
    if study is not None:
        return judge_study(study, runs)
    return judge_study(*study_of(root.resolve().name, runs))
