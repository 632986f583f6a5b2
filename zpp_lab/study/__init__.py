"""Studies: run arms × seeds, judge every arm against the baseline, and report. No torch here.

An **arm** is one recipe of a study, a **run** an arm with one seed, the **baseline** `zero3`.
A **verdict** says where an arm's gap lies (`judge/claims.py`). `run/` starts runs, `judge/` makes
verdicts, `report/` and `wandb_pages/` show them. `speed/` reads measured speeds.
`run_study` and `build_report` are imported when they are first used: a run's process comes
through here too, and needs neither statistics nor charts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zpp_lab.study.report.report import Report, build_report
    from zpp_lab.study.run.attempts import StudyOutcome
    from zpp_lab.study.run.launch import Launch, run_study

__all__ = ["Launch", "Report", "StudyOutcome", "build_report", "run_study"]
_HOMES = {"run_study": "run.launch", "Launch": "run.launch", "StudyOutcome": "run.attempts"}
_HOMES |= {"build_report": "report.report", "Report": "report.report"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
