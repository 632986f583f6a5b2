"""Prints what a study would do: a line an arm, and the whole cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zpp_lab.config import StudyConfig
from zpp_lab.study import attempts
from zpp_lab.study.cost import Estimate, Forecast, estimate
from zpp_lab.study.launch import ENTRY
from zpp_lab.study.plan import Compose, plan_runs
from zpp_lab.study.progress import duration


def dry_run(
    study: StudyConfig,
    root: Path,
    jobs: int = 0,
    *,
    compose: Compose | None = None,
    entry: str = ENTRY,
    console: Console | None = None,
) -> Estimate:
    """Compose every run, measure a few steps of each shape once, and print the forecast.

    Raises what `run_study` raises before its first run; starts no run of the study.
    """
    if compose is None:
        from zpp_lab.compose import compose as hydra_compose

        compose = hydra_compose
    console = console or Console()
    runs = plan_runs(study, root, compose)
    found = estimate(study, root, runs, jobs, entry)
    console.print(_table(study, found.runs))
    for fault in found.faults:
        console.print(f"no cost for the shape of {fault}", soft_wrap=True)
    total = sum(f.bytes for f in found.runs)
    left = [f for f in found.runs if f.state not in ("finished", "diverged")]
    console.print(
        f"{len(found.runs)} runs, {len(found.runs) - len(left)} ended already; about "
        f"{duration(found.seconds)} left with {found.side_by_side} side by side, without start-up; "
        f"the ranks send {amount(total)} in all.",
        soft_wrap=True,
    )
    if study.max_seeds > len(study.seeds):
        console.print(f"Undecided arms get more seeds, up to {study.max_seeds} each.")
    return found


def _table(study: StudyConfig, runs: Sequence[Forecast]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("Arm", "Runs", "Ended", "Begun", "Sent in a run", "Time of a run", "Time left"):
        table.add_column(name, justify="left" if name == "Arm" else "right")
    for one in study.prepare:
        own = [f for f in runs if f.run.prepares and f.run.arm == one.name]
        table.add_row(str(own[0].run), *_cells(study, own))
    for arm in study.arms:
        own = [f for f in runs if not f.run.prepares and f.run.arm == arm.name]
        table.add_row(arm.name, *_cells(study, own))
    return table


def _cells(study: StudyConfig, own: Sequence[Forecast]) -> list[str]:
    ended = Counter(f.state for f in own if f.state != "unfinished")
    lost = sum(bool(attempts.given_up(f.run.dir, study.retries)) for f in own)
    words = [f"{n} {state.replace('_', ' ')}" for state, n in ended.items()]
    begun = sum(f.step > 0 and f.state == "unfinished" for f in own)
    whole = [f.whole_seconds for f in own if f.whole_seconds is not None]
    left = [f.seconds for f in own if f.seconds is not None]
    return [
        str(len(own)),
        ", ".join(words) + (f" ({lost} for good)" if lost else "") or "0",
        str(begun),
        "?" if own[0].run.config.engine.name == "deepspeed" else amount(own[0].bytes),
        duration(whole[0]) if whole else "?",
        duration(sum(left)) if len(left) == len(own) else "?",
    ]


def amount(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
