"""`metrics.jsonl`, the truth about a run: one JSON object a line, one line a step.

Its writer fails loudly and never leaves half a line. JSON has no NaN and no infinity; they are
written as the strings "NaN", "Infinity" and "-Infinity", and `read` gives floats back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zpp_lab.files import damaged, write_atomic

Record = dict[str, Any]

# What a step took, in this start on this machine: all of a record that a repeat does not share.
MEASURED = frozenset({"seconds", "tokens_per_second", "mfu", "wait", "memory"})

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MARKS = (b'NaN"', b'Infinity"')  # a line without them, as nearly all, needs no second look


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON text, NaN and infinities spelled out. TypeError for other objects."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(value, allow_nan=False, indent=indent, separators=separators)
    except ValueError:  # there is a NaN or an infinity in it
        return json.dumps(_spell(value), allow_nan=False, indent=indent, separators=separators)


def from_json(text: bytes | str) -> Any:
    """Return the value that `to_json` wrote. ValueError when it is no JSON."""
    value = json.loads(text)
    raw = text if isinstance(text, bytes) else text.encode()
    return _unspell(value) if any(mark in raw for mark in _MARKS) else value


def read_object(path: Path) -> Record:
    """Read a JSON object that `to_json` wrote. ValueError names a damaged file."""
    try:
        return decode(path.read_bytes())
    except ValueError as error:
        raise damaged(path, error) from None


def encode(record: Record) -> bytes:
    """Return the record's line, with its newline."""
    return to_json(record).encode() + b"\n"


def decode(line: bytes | str) -> Record:
    """Return the record of one line. ValueError when the line is no JSON object."""
    record = from_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {line[:80]!r}")
    return record


def _spell(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _unspell(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unspell(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unspell(item) for item in value]
    return _SPELLED.get(value, value) if isinstance(value, str) else value


def unmeasured(record: Record) -> Record:
    """Return what a repeat of the step shares with it, to the bit."""
    return {key: value for key, value in record.items() if key not in MEASURED}


def read(path: Path | str) -> list[Record]:
    """Return all records of a metrics file; a missing file has none.

    A torn last line, which a killed run leaves behind, is passed over. A broken
    line anywhere else is a ValueError that names it, and so is a step that does
    not follow those before it.
    """
    return [record for _, record in _lines(Path(path))]


def _lines(path: Path, dense: bool = False) -> Iterator[tuple[bytes, Record]]:
    """Each whole line with its record. dense: every step must follow the one before."""
    if not path.exists():
        return
    lines, last = path.read_bytes().split(b"\n"), 0
    rest = lines.pop()  # empty, or a line whose newline never came: torn
    for number, line in enumerate(lines, 1):
        try:
            record = decode(line)
        except ValueError as error:
            if number == len(lines) and not rest:  # a power cut can tear it under its newline
                return
            raise _broken(path, number, error) from None
        if why := out_of_order(record, last, dense):
            raise _broken(path, number, why)
        last = record["step"]
        yield line + b"\n", record


def out_of_order(record: Record, last: int, dense: bool = False) -> str:
    """Return why a record cannot follow step `last`; "" where it can."""
    step = record.get("step")
    if type(step) is int and (step == last + 1 or (step > last and not dense)):
        return ""
    return f"step {step!r} after step {last}"


def _broken(path: Path, number: int, why: object) -> ValueError:
    return ValueError(
        f"{path}, line {number} is damaged ({why}): restore the file from a copy, or restart the "
        "run with run.resume=false"
    )


class MetricsLog:
    """Appends records to a metrics file, each one line, handed to the system at once."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._last = 0
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        whole = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, whole)  # what follows the last newline is half a line

    def append(self, record: Record) -> None:
        """Add one step. OSError when the disk refuses; the lines before it stay whole."""
        step = record["step"]
        assert step > self._last, f"step {step} after step {self._last} in {self.path}"
        data = encode(record)
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise OSError(
                error.errno,
                f"cannot write step {step} to {self.path}: {error.strerror}; free some space, "
                "then run the same command again: it resumes from the newest checkpoint, if "
                "there is one",
            ) from error
        self._last = step

    def truncate_after(self, step: int) -> list[Record]:
        """Drop the lines of later steps, as a resumed run repeats them. Returns those left.
        ValueError for a damaged line, or a step that is missing."""
        lines = list(_lines(self.path, dense=True)) if step else []  # whatever is left of it
        chosen = [(line, record) for line, record in lines if record["step"] <= step]
        whole = sum(len(line) for line, _ in lines)  # less than the file: it has a torn line
        if len(chosen) < len(lines) or os.fstat(self._file).st_size != whole:
            os.close(self._file)
            write_atomic(self.path, b"".join(line for line, _ in chosen).decode())
            self._open()
        self._last = chosen[-1][1]["step"] if chosen else 0
        return [record for _, record in chosen]

    def sync(self) -> None:
        """Put all lines on the disk. Call it before a checkpoint counts as written."""
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Tail:
    """Reads the lines that have been added since the last look, for a reader of a live run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = 0
        self._inode = -1

    def new(self) -> list[Record]:
        """Return the records since the last call, all of them where the file was rewritten."""
        try:
            with open(self.path, "rb") as file:
                self._follow(os.fstat(file.fileno()))
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [decode(line) for line in whole.splitlines()]

    def _follow(self, status: os.stat_result) -> None:
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
