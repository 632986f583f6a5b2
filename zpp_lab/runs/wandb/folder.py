"""A run's folder, seen by the process that sends it to wandb.

Plain files and mappings, so that a folder of an older version can still be sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zpp_lab.files import (
    COMPLETIONS,
    CONFIG,
    CONSOLE,
    FAILURE,
    LOG,
    METRICS,
    SUMMARY,
    damaged,
    read_yaml,
    write_atomic,
)
from zpp_lab.runs.metrics import Record, read_object, to_json
from zpp_lab.runs.provenance import FILE as COMMITS

STATE = "wandb.json"
SINK_LOG = "wandb.log"


class RunFolder:
    """The files of one run, and `wandb.json`: what wandb has been given of it.

    `wandb.json` holds `id` (drawn once, kept for good: a resumed run goes on under
    it), `mode`, `state` (sending, complete, failed), `sent_step`, `gaps` (loss gaps are there
    up to this step), `error`, `url`, and `ended`, which tells one ending of the run from another.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        self.metrics = self.path / METRICS

    def config(self) -> dict[str, Any]:
        """Return the run's config. FileNotFoundError when this is no run folder."""
        return read_yaml(self.path / CONFIG)

    def outcome(self) -> dict[str, Any] | None:
        """Return the summary or the failure, None while the run goes on."""
        for name, read in ((SUMMARY, read_summary), (FAILURE, read_object)):
            with contextlib.suppress(FileNotFoundError):
                return read(self.path / name)
        return None

    def watched(self, config: dict[str, Any]) -> bool:
        """Return whether system metrics are asked for while the run goes on."""
        return bool((config.get("tracking") or {}).get("system", True))

    def commit(self) -> str | None:
        """Return the code of the last start, where it is known."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads((self.path / COMMITS).read_text())[-1]["commit"]
        return None

    def console_after(self, start: int) -> tuple[int, str]:
        """Return the console's whole lines after `start` bytes, and where they end."""
        files = [self.path / name for name in (CONSOLE, LOG) if (self.path / name).is_file()]
        data = files[0].read_bytes() if files else b""
        start = start if start <= len(data) else 0
        end = max(start, data.rfind(b"\n") + 1)
        return end, data[start:end].decode(errors="replace")

    def completions(self, step: int) -> list[Record]:
        """Return the examples of a run with rewards that were sampled after `step` steps."""
        path = self.path / COMPLETIONS
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [row for row in map(json.loads, text.splitlines()) if row["step"] == step]

    def ended(self) -> str | None:
        """Return a mark of this ending, which no retried or resumed run shares; None before."""
        for name in (SUMMARY, FAILURE):
            with contextlib.suppress(FileNotFoundError):
                written = os.stat(self.path / name).st_mtime_ns
                return f"{name} {written} after {os.stat(self.metrics).st_size} bytes"
        return None

    def state(self) -> dict[str, Any]:
        """Return what wandb.json says; made on the first call, with a new run id."""
        found = read_state(self.path / STATE)
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", self.path.name)[:60].strip("-")
        return found or self.note(id=f"{slug or 'run'}-{secrets.token_hex(4)}")

    def sent(self) -> str | None:
        """Return the mark of the ending that wandb has, None when it has none."""
        if not (self.path / STATE).exists():
            return None
        state = self.state()
        return state.get("ended") if state.get("state") == "complete" else None

    def note(self, **changes: Any) -> dict[str, Any]:
        """Write changes to wandb.json and return all of it."""
        if "id" not in changes:
            self.state()  # there is always an id
        return write_state(self.path / STATE, **changes)

    @contextlib.contextmanager
    def lock(self, wait: bool) -> Iterator[None]:
        """Yield one sender at a time: a resumed run's sender waits for the one before it.

        RuntimeError when another one is at work and `wait` is false.
        """
        with open(self.path / ".wandb.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise RuntimeError(
                    f"{self.path} is being sent to wandb by another process: wait until it ends"
                ) from None
            yield


def read_summary(path: Path) -> Record:
    """Return a run's summary.json. FileNotFoundError, or ValueError that names a damaged one."""
    found = read_object(path)
    for name, kinds in (("steps", int), ("bytes", dict), ("heldout_loss", int | float | None)):
        if name not in found or not isinstance(found[name], kinds):
            texts = repr(found[name]) if name in found else "missing"
            raise damaged(path, f"{name}: {texts}")
    return found


def read_state(path: Path) -> dict[str, Any]:
    """Return what this file says of a wandb run; {} without the file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def write_state(path: Path, **changes: Any) -> dict[str, Any]:
    """Write changes over what is known and return all of it."""
    state = {**read_state(path), **changes}
    write_atomic(path, json.dumps(state, indent=1) + "\n")
    return state


def run_folders(root: Path | str) -> list[RunFolder]:
    """Return every run folder in `root` or below it, in the order of their names."""
    found = []
    for folder, below, files in os.walk(root):
        if METRICS in files:
            found.append(RunFolder(folder))
            below.clear()
        below.sort()
    return found


def write_failure(folder: Path, failure: Record) -> None:
    """Leave what ended the run in `folder`."""
    write_atomic(folder / FAILURE, to_json(failure, indent=1) + "\n")
