"""What a study shows while it runs: lines of the call itself, and `--watch` from any terminal.

`--watch` reads everything from the run folders. A run counts as running while a living process
holds its folder. Without a terminal one table is printed.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zpp_lab.config.study import StudyConfig
from zpp_lab.files import CONFIG, FAILURE, SUMMARY, held, missing, read_yaml
from zpp_lab.runs.reader import last_record, last_step, queued_at, read_run, read_study
from zpp_lab.study.run.plan import PlannedRun, check_folder, run_folder

_CLEAR = "\r\x1b[K"
ENDED = ("finished", "diverged", "out_of_memory", "crashed")
_LOOK = 2.0  # seconds between looks
_QUIET = 60.0  # seconds without a word, after which one is said where no terminal is


class Progress:
    """Counts runs and steps. The live line is a terminal's; elsewhere it is said now and then."""

    def __init__(self, total: int, todo: Sequence[PlannedRun], stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._total, self._ended = total, total - len(todo)
        self._begun = {run.dir: last_step(run.dir) for run in todo}  # resumed runs start late
        self._steps = sum(run.config.train.steps - self._begun[run.dir] for run in todo)
        self._done = 0
        self._start = self._said = time.monotonic()

    def add(self, runs: Sequence[PlannedRun]) -> None:
        """Add runs that were decided on later."""
        self._total += len(runs)
        self._begun |= {run.dir: last_step(run.dir) for run in runs}
        self._steps += sum(run.config.train.steps - self._begun[run.dir] for run in runs)

    def ended(self, run: PlannedRun, text: str) -> None:
        self._ended += 1
        self._done += run.config.train.steps - self._begun[run.dir]
        width = len(str(self._total))
        self.say(f"[{self._ended:{width}}/{self._total}] {run}: {text}")

    def say(self, text: str) -> None:
        self._stream.write(f"{_CLEAR if self._live else ''}{text}\n")
        self._stream.flush()
        self._said = time.monotonic()

    def update(self, running: Sequence[PlannedRun]) -> None:
        """Rewrite the live line from the running runs' last steps."""
        if not running or not (self._live or time.monotonic() - self._said >= _QUIET):
            return
        steps = [(run, last_step(run.dir)) for run in running]
        done = self._done + sum(max(0, step - self._begun[run.dir]) for run, step in steps)
        each = (time.monotonic() - self._start) / done if done else None
        left = duration(each and each * max(0, self._steps - done))
        now = ", ".join(f"{run} {step}/{run.config.train.steps}" for run, step in steps)
        line = f"{self._ended}/{self._total} runs, {left} left: {now}"
        if not self._live:
            return self.say(line)
        self._stream.write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def close(self) -> None:
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()


class Countdown:
    """Says before each run of a sweep which of how many it is and, by the mean time of those
    before, how long the rest will take. total None: unknown."""

    def __init__(self, total: int | None, stream: TextIO | None = None) -> None:
        self._total, self._stream = total, stream or sys.stderr
        self._index, self._took = 0, list[float]()

    @contextmanager
    def run(self, ended: bool) -> Iterator[None]:
        """Yield one run; `ended`: in an earlier call, so its time says nothing."""
        self._index += 1
        self._stream.write(f"{self._line()}\n")
        self._stream.flush()
        began = time.monotonic()
        try:
            yield
        finally:
            if not ended:
                self._took.append(time.monotonic() - began)

    def _line(self) -> str:
        if self._total is None:
            return f"run {self._index}"
        text = f"run {self._index} of {self._total}"
        if not self._took:
            return text
        minutes = round(fmean(self._took) * (self._total - self._index + 1) / 60)
        left = (
            f"about {minutes} minute{'' if minutes == 1 else 's'}" if minutes else "under a minute"
        )
        return f"{text}, {left} left"


def duration(seconds: float | None) -> str:
    """Return 4:05 or 1:04:05, from 100 hours on 1,845 h; ? when it is not known."""
    if seconds is None:
        return "?"
    if seconds >= 360_000:
        return f"{seconds / 3600:,.0f} h"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class RunState:
    """One run: finished, diverged, crashed, running, stopped, queued again, waiting …"""

    arm: str
    seed: int
    state: str
    step: int = 0
    steps: int | None = None
    seconds: float = 0.0  # of its steps so far
    loss: float | None = None  # held out, of a finished run


class Watch:
    """Looks at a study's folder again and again; what has ended is read once."""

    def __init__(self, root: Path, study: StudyConfig | None = None) -> None:
        """ValueError when `root` holds no study, or another one."""
        found = read_study(root) if root.is_dir() else None
        if found is None:
            text = "" if root.is_dir() else f" ({missing(root)})"
            raise ValueError(
                f"{root}: no study has been started here{text}; start it without --watch, or set "
                "its folder with --dir"
            )
        if study is not None:
            check_folder(study, root)
        self.root, self.study = root, found
        self._known: dict[Path, RunState] = {}
        self._steps: dict[Path, int] = {}

    @property
    def running(self) -> bool:
        """Whether a process works on the study now."""
        return held(self.root)

    def look(self) -> list[RunState]:
        """Return the state of every run, arms in the study's order."""
        return [
            self._state(arm.name, seed) for arm in self.study.arms for seed in self._seeds(arm.name)
        ]

    def _seeds(self, arm: str) -> list[int]:
        """The study's seeds, and those that were added until a verdict."""
        names = [path.name for path in (self.root / arm).glob("seed*")]
        added = {int(n[4:]) for n in names if n[4:].isdigit()}
        return sorted(added | set(self.study.seeds))

    def _state(self, arm: str, seed: int) -> RunState:
        folder = run_folder(self.root, arm, seed)
        if folder in self._known:
            return self._known[folder]
        running = held(folder)  # asked first: a run that ends meanwhile has not stopped
        last = last_record(folder) or {}
        step, seconds = int(last.get("step", 0)), float(last.get("seconds", 0.0))
        ended = any((folder / name).exists() for name in (SUMMARY, FAILURE))
        run = read_run(folder) if ended else None
        if running:
            state = "running"
        elif run is not None and run.outcome in ENDED:
            state = run.outcome
        elif step:
            state = "queued again" if queued_at(folder) == step else "stopped"
        else:
            state = "waiting"
        loss = run.heldout_loss if run is not None else None
        found = RunState(arm, seed, state, step, self._planned(folder), seconds, loss)
        if state == "finished":
            self._known[folder] = found
        return found

    def _planned(self, folder: Path) -> int | None:
        """train.steps of the run, known once it has started."""
        path = folder / CONFIG
        if folder not in self._steps and path.exists():
            self._steps[folder] = int(read_yaml(path)["train"]["steps"])
        return self._steps.get(folder)


def seconds_left(states: Sequence[RunState]) -> float | None:
    """Predict from the pace of all steps so far and the runs side by side; None before any."""
    seconds, steps = sum(s.seconds for s in states), sum(s.step for s in states)
    planned = [s.steps for s in states if s.steps is not None]
    if not steps or not planned:
        return None
    open_runs = [s for s in states if s.state not in ENDED]
    left = sum((s.steps or fmean(planned)) - s.step for s in open_runs)
    side = sum(s.state == "running" for s in states) or 1
    return max(0.0, left * seconds / steps / side)


def show(root: Path, study: StudyConfig | None = None, console: Console | None = None) -> None:
    """Print the table; on a terminal again and again until the study ends or Ctrl-C."""
    console = console or Console()
    watch = Watch(root, study)
    if not console.is_terminal:
        console.print(_page(watch))
        return
    with Live(_page(watch), console=console, auto_refresh=False) as live:
        try:
            while watch.running:
                time.sleep(_LOOK)
                live.update(_page(watch), refresh=True)
        except KeyboardInterrupt:
            return  # the study goes on


def _page(watch: Watch) -> Group:
    states = watch.look()
    counts = Counter(s.state for s in states)
    parts = [f"{counts['finished']} of {len(states)} runs finished"]
    parts += [f"{n} {_words(state)}" for state, n in counts.items() if state != "finished"]
    left = seconds_left(states)
    if watch.running and left is not None:
        parts.append(f"about {duration(left)} left")
    if not watch.running:
        parts.append("no process is running here")
    return Group(Text(f"{watch.study.name}: {', '.join(parts)}"), _table(watch.study, states))


def _table(study: StudyConfig, states: Sequence[RunState]) -> Table:
    table = Table(box=None, pad_edge=False)
    read = "Held-out loss" if study.points is None else "Held-out failures"
    for name in ("Arm", "Finished", "Now", read, "Other outcomes"):
        table.add_column(name, overflow="fold")
    for arm in study.arms:
        own = [s for s in states if s.arm == arm.name]
        losses = [s.loss for s in own if s.loss is not None]
        others = Counter(s.state for s in own if s.state in ENDED and s.state != "finished")
        now = [_now(s) for s in own if s.state in ("running", "stopped", "queued again")]
        table.add_row(
            arm.name,
            f"{sum(s.state == 'finished' for s in own)} of {len(own)}",
            ", ".join(now),
            f"{fmean(losses):.4f}" if losses else "",
            ", ".join(f"{n} {_words(state)}" for state, n in others.items()),
        )
    return table


def _now(s: RunState) -> str:
    where = "" if s.state == "running" else f"{s.state} at "
    return f"seed {s.seed}: {where}{s.step}/{s.steps or '?'}"


def _words(state: str) -> str:
    return state.replace("_", " ")
