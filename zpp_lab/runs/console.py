"""What a person sees of a run: one line that renews itself, or plain lines in a log.

`ConsoleLog` keeps all that a process says, whoever says it, as lines of a file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


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
        parts = [self.label, f"step {self._step}/{self.total}", f"loss {record['loss']:.4f}"]
        if self._heldout is not None:
            parts.append(f"held-out {self._heldout:.4f}")
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

    def __init__(self, path: Path, anew: bool, every_seconds: float = 10.0) -> None:
        self._file: TextIO | None = None
        self._every, self._kept = every_seconds, -every_seconds
        self._own = [_Copied(sys.stdout, self), _Copied(sys.stderr, self)]
        try:
            if anew:
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
        self._own[1].stream.write(f"the console's log is left: {error}\n")

    def renewed(self, line: str) -> None:
        now = time.monotonic()
        if now - self._kept >= self._every:
            self._kept = now
            self.keep(line)

    def close(self) -> None:
        """stdout and stderr are again what they were, if nobody else has changed them since."""
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
