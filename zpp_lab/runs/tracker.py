"""Everything that is written down about a run while it trains.

The metrics file and the run's summary are the truth: if they cannot be written,
the run stops. The console, wandb and TensorBoard are views of them: if one fails, it
says so once on stderr and training goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zpp_lab.config.flat import every_setting, run_name
from zpp_lab.config.schema import Config
from zpp_lab.files import (
    CONFIG,
    CONSOLE,
    FAILURE,
    METRICS,
    SUMMARY,
    is_full,
    remove_unwritten,
    write_atomic,
)
from zpp_lab.runs.console import ConsoleLog, Progress
from zpp_lab.runs.metrics import MetricsLog, Record, to_json
from zpp_lab.runs.wandb.mode import Mode, resolve
from zpp_lab.runs.wandb.process import SinkHandle, start_run_sink

if TYPE_CHECKING:
    from zpp_lab.runs.tensorboard import EventFiles


class Tracker:
    """Writes config.yaml, metrics.jsonl and at last summary.json or failure.json.

    One process of a run has one, that of rank 0. `resume_step` is the number of
    steps that the checkpoint has done: later lines are dropped, as the run will
    repeat them, and so is the summary or failure of an earlier attempt.

    Raises ValueError when wandb is asked for what this machine cannot do, or when
    metrics.jsonl lacks steps that the checkpoint has; OSError when the folder
    cannot be written.
    """

    def __init__(self, config: Config, run_dir: Path | str, resume_step: int) -> None:
        self.config, self.folder = config, Path(run_dir).resolve()
        mode, why = _wandb_mode(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY, FAILURE):
            (self.folder / name).unlink(missing_ok=True)
        remove_unwritten(self.folder)
        text = yaml.safe_dump(every_setting(config), sort_keys=False, allow_unicode=True)
        write_atomic(self.folder / CONFIG, text)
        self._metrics = MetricsLog(self.folder / METRICS)
        self.last: Record | None = None  # the last step's record
        self.bytes: dict[str, dict[str, int]] = {}  # {wire: {hop: bytes}} of all steps so far
        self._restore(resume_step)
        self._console: ConsoleLog | None = None
        if config.tracking.console and not config.run.study:
            self._console = ConsoleLog(self.folder / CONSOLE, anew=resume_step == 0)
        label = run_name(dataclasses.asdict(config))
        self._progress = Progress(config.train.steps, label, first_step=resume_step)
        self._broken: set[str] = set()
        self._sink: SinkHandle | None = None
        self._guard("console", lambda: self._announce(why and f"wandb: {mode} ({why})"))
        self._guard("wandb", lambda: self._start_sink(mode))
        self._events: EventFiles | None = None
        if config.tracking.tensorboard:
            self._guard("tensorboard", lambda: self._open_events(resume_step))

    def log(self, record: Record) -> None:
        """Write one step. OSError when metrics.jsonl cannot be written."""
        self._metrics.append(record)
        self._count(record)
        self._guard("console", lambda: self._progress.update(record))
        if self._events is not None:
            self._guard("tensorboard", partial(self._events.log, record))

    def passing(self, done: int, passes: int) -> None:
        """So many of a step's passes have begun."""
        self._guard("console", lambda: self._progress.passing(done, passes))

    def sync(self) -> None:
        """Put the metrics on the disk; call it before a checkpoint counts as written."""
        self._metrics.sync()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, the last file of a run that reached its end."""
        self._metrics.sync()
        write_atomic(self.folder / SUMMARY, to_json(summary, indent=1) + "\n")
        self._close(summary)
        seconds = self.config.tracking.wait_seconds
        if self._sink is not None:
            self._guard("wandb", partial(self._sink.end, seconds))

    def pause(self) -> None:
        """The run stops here for now, without a summary or a failure; another start goes on."""
        self._metrics.sync()
        self._close()

    def fail(self, info: dict[str, Any], *, full: bool = False) -> None:
        """Write failure.json. Never raises: the failure itself is what must be seen. full: it is
        that the disk is full, so a second line on that is not said."""
        try:
            write_atomic(self.folder / FAILURE, to_json(info, indent=1) + "\n")
        except Exception as error:
            if not (full and is_full(error)):
                _say(f"cannot write {self.folder / FAILURE}: {error}")
        if self._console is not None:  # which nobody has printed yet
            self._console.keep(str(info.get("traceback") or info.get("error") or "").rstrip())
        self._close()

    def _restore(self, resume_step: int) -> None:
        for record in self._metrics.truncate_after(resume_step):
            self._count(record)
        last = self.last["step"] if self.last else 0
        if last != resume_step:
            self._metrics.close()
            raise ValueError(
                f"{self.folder / METRICS} ends at step {last}, but the checkpoint is of step "
                f"{resume_step}: restore the file, or remove the checkpoints after step {last}, "
                "or start anew with run.resume=false"
            )

    def _count(self, record: Record) -> None:
        self.last = record
        for wire, hops in record.get("bytes", {}).items():
            total = self.bytes.setdefault(wire, dict.fromkeys(hops, 0))
            for hop, count in hops.items():
                total[hop] += count

    def _announce(self, line: str) -> None:
        if line:
            print(line, flush=True)

    def _start_sink(self, mode: Mode) -> None:
        self._sink = start_run_sink(self.folder, mode)

    def _open_events(self, done: int) -> None:
        from zpp_lab.runs.tensorboard import EventFiles

        self._events = EventFiles(self.folder, done)

    def _close(self, outcome: dict[str, Any] | None = None) -> None:
        self._metrics.close()
        if self._events is not None:
            self._guard("tensorboard", partial(self._events.close, outcome))
        self._guard("console", self._progress.close)
        if self._console is not None:
            self._console.close()

    def _guard(self, view: str, action: Callable[[], Any]) -> None:
        """Run a view's action; its first fault ends the view, not the training."""
        if view in self._broken:
            return
        try:
            action()
        except Exception as error:
            self._broken.add(view)
            _say(f"{view} failed and is left out from here on: {type(error).__name__}: {error}")


def _wandb_mode(config: Config) -> tuple[Mode, str]:
    """The mode, and why when the run left it open. A study sends its runs itself."""
    if config.run.study:
        return "off", ""
    mode, why = resolve(config.tracking.wandb)
    return mode, why if config.tracking.wandb == "auto" else ""


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)
