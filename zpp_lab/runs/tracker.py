"""Writes down a run while it trains.

The metrics file and the run's summary are the truth: if they cannot be written, the run stops. The
console, wandb and TensorBoard are views of them: if one fails, it says so once on stderr and
training continues without it. `ConsoleLog` copies all output of the process into a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from zpp_lab import files
from zpp_lab.config.flat import every_setting, run_name
from zpp_lab.config.schema import Config
from zpp_lab.runs.checkpoint.origin import History, Origin, settings_digest
from zpp_lab.runs.metrics import MetricsLog, Record, to_json
from zpp_lab.runs.wandb.mode import Mode, resolve
from zpp_lab.runs.wandb.process import SinkHandle, start_run_sink

if TYPE_CHECKING:
    from zpp_lab.runs.tensorboard import EventFiles


class Progress:
    """Shows step, loss, held-out loss, speed, what it is of the GPUs' peak, memory, how much of the
    last step was waiting for data (from 1 % on), and the time left.

    On a terminal one line is rewritten, at most ten times a second. Elsewhere a
    plain line is printed at every evaluation, at the end, and otherwise when
    `every_seconds` have gone by since the last one.
    """

    def __init__(
        self,
        total_steps: int,
        label: str,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_step` is the number of steps done before this process began."""
        self.total, self.label = total_steps, label
        self.stream = sys.stdout if stream is None else stream
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.interval = 0.1 if self.live else every_seconds
        self._clock = clock
        self._start = self._shown = clock()
        self._first = self._step = first_step
        self._heldout: float | None = None
        self._tokens: tuple[float, float] | None = None  # the first record's tokens and time
        self._open = False

    def update(self, record: dict[str, Any]) -> None:
        """Take one step's record, as it stands in metrics.jsonl."""
        now = self._clock()
        self._step = record["step"]
        self._heldout = record.get("heldout_loss", self._heldout)
        if self._tokens is None:
            self._tokens = (record["tokens"], now)
        notable = "heldout_loss" in record or self._step >= self.total
        if notable or now - self._shown >= self.interval:
            self._shown = now
            self._show(self._line(record, now))

    def passing(self, done: int, passes: int) -> None:
        """A step of many simulated ranks is under way: `done` of its passes have begun."""
        now = self._clock()
        if now - self._shown >= self.interval:
            self._shown = now
            step = f"step {self._step + 1}/{self.total}"
            self._show(f"{self.label}  {step}  forward and backward {done} of {passes}")

    def close(self) -> None:
        """End the renewed line, so that what is printed next stands on its own."""
        if self._open:
            self.stream.write("\n")
            self.stream.flush()
            self._open = False

    def _show(self, line: str) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r{line[:width]}\x1b[K")
            self._open = True
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def _line(self, record: dict[str, Any], now: float) -> str:
        parts = [self.label, f"step {self._step}/{self.total}"]
        rl = record.get("rl")  # whose loss says nothing
        parts.append(f"reward {rl['reward']:.3f}" if rl else f"loss {record['loss']:.4f}")
        if self._heldout is not None:
            known = f"success {1 - self._heldout:.1%}" if rl else f"{self._heldout:.4f}"
            parts.append(f"held-out {known}")
        parts += [self._speed(record["tokens"], now), *_measured(record), self._eta(now)]
        return "  ".join(part for part in parts if part)

    def _speed(self, tokens: float, now: float) -> str:
        assert self._tokens is not None
        first, since = self._tokens
        return f"{_short((tokens - first) / (now - since))} tok/s" if now > since else ""

    def _eta(self, now: float) -> str:
        if self._step >= self.total:
            return f"took {_duration(now - self._start)}"
        done = self._step - self._first
        left = (self.total - self._step) * (now - self._start) / done if done else 0.0
        return f"ETA {_duration(left)}" if done else ""


class ConsoleLog:
    """What Python writes to stdout and stderr until `close` goes to a file as well, line by line;
    of a line that renews itself one state each `every_seconds`. A file that cannot be written is
    said once and left."""

    def __init__(self, path: Path, fresh: bool, every_seconds: float = 10.0) -> None:
        self._file: TextIO | None = None
        self._every, self._kept = every_seconds, -every_seconds
        self._own = [_Copied(sys.stdout, self), _Copied(sys.stderr, self)]
        try:
            if fresh:
                path.unlink(missing_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            self._leave(error)
        sys.stdout, sys.stderr = self._own  # type: ignore[assignment]

    def keep(self, line: str) -> None:
        """Add a line."""
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        self._file = None
        self._own[1].stream.write(f"console.log is no longer written: {error}\n")

    def renewed(self, line: str) -> None:
        now = time.monotonic()
        if now - self._kept >= self._every:
            self._kept = now
            self.keep(line)

    def close(self) -> None:
        """Restore stdout and stderr, if nobody else has changed them since."""
        for name, own in zip(("stdout", "stderr"), self._own, strict=True):
            if getattr(sys, name) is own:
                setattr(sys, name, own.stream)
            own.end()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class _Copied:
    """A stream whose lines a log gets too."""

    def __init__(self, stream: TextIO, log: ConsoleLog) -> None:
        self.stream, self._log, self._open = stream, log, ""

    def write(self, text: str) -> int:
        written = self.stream.write(text)
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            self._log.keep(_plain(line))
        if "\r" in self._open:
            self._open = self._open[self._open.rfind("\r") :]
            self._log.renewed(_plain(self._open))
        return written

    def end(self) -> None:
        if self._open:
            self._log.keep(_plain(self._open))
            self._open = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _plain(line: str) -> str:
    """What a terminal would show of it at last."""
    return line.rstrip("\r").rpartition("\r")[2].removesuffix("\x1b[K")


def _measured(record: dict[str, Any]) -> Iterator[str]:
    """Of the record's last step: MFU, the most memory so far, waiting for data."""
    if "mfu" in record:
        yield f"MFU {record['mfu']:.1%}"
    memory = record.get("memory", {})
    if memory:
        yield f"{memory.get('gpu_gib', memory['host_gib']):.2f} GiB"
    share = record.get("wait", {}).get("data", 0) * record.get("tokens_per_second", 0)
    if share and (waited := share / record["tokens"] * record["step"]) >= 0.01:
        yield f"waits for data {waited:.0%}"


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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
        asked = config.tracking.wandb
        mode, why = resolve("off" if config.run.study else asked)  # a study sends its runs itself
        why = why if asked == "auto" and not config.run.study else ""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (files.SUMMARY, files.FAILURE):
            (self.folder / name).unlink(missing_ok=True)
        files.remove_unwritten(self.folder)
        text = yaml.safe_dump(every_setting(config), sort_keys=False, allow_unicode=True)
        files.write_atomic(self.folder / files.CONFIG, text)
        self._metrics = MetricsLog(self.folder / files.METRICS)
        self.last: Record | None = None  # the last step's record
        self.bytes: dict[str, dict[str, int]] = {}  # {wire: {hop: bytes}} of all steps so far
        self._history = History()
        self._restore(resume_step)
        self._console: ConsoleLog | None = None
        if config.tracking.console and not config.run.study:
            self._console = ConsoleLog(self.folder / files.CONSOLE, fresh=resume_step == 0)
        label = run_name(dataclasses.asdict(config))
        self._progress = Progress(config.train.steps, label, first_step=resume_step)
        self._broken: set[str] = set()
        self._sink: SinkHandle | None = None
        if why:
            self._guard("console", lambda: print(f"wandb: {mode} ({why})", flush=True))
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

    def origin(self) -> Origin:
        """Return whose the state after the last logged step is, for a checkpoint's index."""
        return Origin(settings_digest(self.config), self._history.digest())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, the last file of a run that reached its end."""
        self._metrics.sync()
        files.write_atomic(self.folder / files.SUMMARY, to_json(summary, indent=1) + "\n")
        self._close(summary)
        seconds = self.config.tracking.wait_seconds
        if self._sink is not None:
            self._guard("wandb", partial(self._sink.end, seconds))

    def pause(self) -> None:
        """Stop the run here for now, without a summary or a failure; another start goes on."""
        self._metrics.sync()
        self._close()

    def fail(self, info: dict[str, Any], *, full: bool = False) -> None:
        """Write failure.json. Never raises: the failure itself is what must be seen. full: it is
        that the disk is full, so a second line on that is not said."""
        try:
            files.write_atomic(self.folder / files.FAILURE, to_json(info, indent=1) + "\n")
        except Exception as error:
            if not (full and files.is_full(error)):
                _say(f"cannot write {self.folder / files.FAILURE}: {error}")
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
                f"{self.folder / files.METRICS} ends at step {last}, but the checkpoint is of step "
                f"{resume_step}: restore the file, remove the checkpoints after step {last}, or "
                "start over with run.resume=false"
            )

    def _count(self, record: Record) -> None:
        self.last = record
        self._history.add(record)
        for wire, hops in record.get("bytes", {}).items():
            total = self.bytes.setdefault(wire, dict.fromkeys(hops, 0))
            for hop, count in hops.items():
                total[hop] += count

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
            _say(f"{view} failed and is switched off for this run: {type(error).__name__}: {error}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)
