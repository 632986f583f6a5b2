"""From a folder to its verdicts, for whoever wants them without a report."""

from __future__ import annotations

from pathlib import Path

from zpp_lab.config import StudyConfig
from zpp_lab.folders import below
from zpp_lab.study.arms import study_of
from zpp_lab.study.plan import PREPARE
from zpp_lab.study.runs import STUDY_FILE, find_runs, read_run, read_study
from zpp_lab.study.states import told
from zpp_lab.study.verdict import StudyResult, judge_study


def read_result(root: Path, study: StudyConfig | None = None) -> StudyResult:
    """The verdicts of the runs at and below `root`.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    Raises ValueError when there are no runs or one cannot be read.
    """
    runs = find_runs(root)
    study = study or read_study(root)
    if study is not None:
        return judge_study(study, runs, _prepare_notes(root, study))
    if not runs:
        raise ValueError(
            f"{root}: no runs in or below it (none has a config.yaml); run something first, or "
            f"name another folder{below(root.resolve().parent, STUDY_FILE)}"
        )
    return judge_study(*study_of(root.resolve().name, runs))


def _prepare_notes(root: Path, study: StudyConfig) -> list[str]:
    """Sentences on the runs that no arm can start without, where they have not finished."""
    notes = []
    for one in study.prepare:
        folder = root / PREPARE / one.name
        run = read_run(folder) if (folder / "config.yaml").is_file() else None
        if run is None or run.outcome != "finished":
            notes.append(f"{PREPARE} {one.name}, which arms start from, {told(run)}.")
    return notes
