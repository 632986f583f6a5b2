"""How a run's process ended, its failed starts, and whether another start is worth it.

failure.json tells the last one only, and a start removes it; `attempts.jsonl` next to it keeps
them all: one line a failed start, with its outcome, error and step. `StudyOutcome` says how a
study's whole call ended.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zpp_lab.files import FAILURE, LOG, write_atomic
from zpp_lab.runs.metrics import from_json, to_json
from zpp_lab.runs.reader import Run, read_json, read_run
from zpp_lab.study.run.plan import PlannedRun, write_config
from zpp_lab.train.time_slice import PAUSED

FILE = "attempts.jsonl"
Attempt = Mapping[str, Any]
_TAIL_LINES, _TAIL_BYTES = 30, 8192


def attempts(folder: Path) -> list[Attempt]:
    """Return the failed starts, oldest first; a failure.json that nobody noted counts as one."""
    found = [one for line in _text(folder).splitlines() if (one := _attempt(line)) is not None]
    if not found and (last := read_json(folder / FAILURE)) is not None:
        found = [last]
    return [one for one in found if one.get("outcome") != "interrupted"]


def note(folder: Path, failure: Attempt) -> None:
    """Add one failed start."""
    line = to_json({key: failure.get(key) for key in ("outcome", "error", "step")})
    before = _text(folder)
    torn = before != "" and not before.endswith("\n")
    with open(folder / FILE, "a", encoding="utf-8") as file:
        file.write("\n" * torn + line + "\n")


def _text(folder: Path) -> str:
    try:
        return (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _attempt(line: str) -> Attempt | None:
    """None for a line that a kill or a full disk has cut."""
    try:
        found: Attempt = from_json(line)
    except ValueError:
        return None
    return found


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def given_up(folder: Path, retries: int) -> str | None:
    """Return why a failed run is not started again, None when it is.

    A divergence repeats itself: the run is deterministic. A crash or a lack of memory may not,
    and is tried again `retries` times.
    """
    failed = attempts(folder)
    if not failed:
        return None
    if failed[-1].get("outcome") == "diverged":
        return "it diverged, and a repeat would diverge again"
    if len(failed) > retries:
        return f"it failed {len(failed)} times"
    return None


@dataclass(frozen=True)
class StudyOutcome:
    """How a study's call ended; all name runs as "arm seed n".

    A divergence is a result. What failed crashed or ran out of memory.
    """

    finished: Sequence[str]
    skipped: Sequence[str]  # finished before this call
    failed: Sequence[str]
    diverged: Sequence[str] = ()
    given_up: Sequence[str] = ()  # of those that failed: too often to be tried again
    unfinished: Sequence[str] = ()  # left over by Ctrl-C, SIGTERM or --for
    out_of_time: bool = False  # by --for
    waiting: Sequence[str] = ()  # for a run that prepares the study
    ends: Mapping[str, str] = field(default_factory=dict)  # of those that have not finished, how

    @property
    def exit_code(self) -> int:
        """For the shell: 0 all ended, 1 a run failed, 75 out of time, 130 interrupted."""
        if self.unfinished:
            return PAUSED if self.out_of_time else 130
        return int(bool(self.failed or self.waiting))

    def _told(self, names: Sequence[str]) -> list[str]:
        """A line for each of these runs that has begun, and one for the others."""
        begun = [name for name in names if name in self.ends]
        lines = [f"  {name}: {self.ends[name]}" for name in begun]
        rest = len(names) - len(begun)
        return [*lines, *([f"  {rest} not started"] if rest else [])]

    @property
    def message(self) -> str:
        done = len(self.finished) + len(self.skipped)
        total = done + len(self.failed) + len(self.diverged) + len(self.unfinished)
        total += len(self.waiting)
        lines = [f"{done} of {total} runs finished."]
        if self.diverged:
            lines += ["Diverged, not repeated:", *self._told(self.diverged)]
        if self.failed:
            lines += [
                "Failed; the same command repeats them:",
                *self._told(self.failed),
                f"Details are in each run's folder (failure.json, {LOG}).",
            ]
        if self.given_up:
            lines.append(
                f"Failed too often; repeated only with --retry: {', '.join(self.given_up)}."
            )
        if self.waiting:
            lines.append(f"{len(self.waiting)} runs wait for their prepared runs.")
        if self.unfinished:
            why = "Out of time" if self.out_of_time else "Interrupted"
            lines += [f"{why}:", *self._told(self.unfinished)]
            lines.append("The same command resumes from here; nothing is repeated.")
        return "\n".join(lines)


def ended_run(
    run: PlannedRun, code: int, out_of_memory: bool = False, how: str | None = None
) -> Run:
    """Return the run as its folder shows it; one that left no word gets its failure.json here.

    out_of_memory: the kernel has killed a process of this machine for it meanwhile.
    how: what to say of a run that left no word, in place of the exit code.
    """
    if not run.finished:
        write_config(run)  # a run that failed early has not done it itself
        if not (run.dir / FAILURE).exists():
            killed = code == -signal.SIGKILL and out_of_memory
            how = how or (last_error(run.dir / LOG) if code == 1 else None) or how_it_ended(code)
            _write_failure(run.dir, how, "out_of_memory" if killed else "crashed")
    return read_run(run.dir)


def ending(run: Run) -> str:
    """Return one line on a run that ended."""
    if run.summary is not None:
        return f"held-out loss {run.summary['heldout_loss']:.4f}, {run.summary['seconds']:.0f} s"
    error = str((run.failure or {}).get("error", "")).strip().splitlines() or [""]
    return f"{run.outcome.replace('_', ' ')}: {error[0]}"


def _write_failure(folder: Path, error: str, outcome: str) -> None:
    failure = {
        "outcome": outcome,
        "error": error,
        "step": None,
        "traceback": log_tail(folder / LOG),
    }
    write_atomic(folder / FAILURE, json.dumps(failure, indent=1) + "\n")


def last_error(log: Path) -> str | None:
    """Return the exception that a log ends with, as Python prints it; None without one."""
    last = (log_tail(log).splitlines() or [""])[-1]
    return last if re.match(r"[\w.]+(Error|Exception|Failed): ", last) else None


def how_it_ended(code: int) -> str:
    """Return an exit code in words; negative codes are signals."""
    if code >= 0:
        return f"the process ended with exit code {code} and without a summary; see {LOG}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the machine may be out of memory)" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}; see {LOG}"


def log_tail(path: Path) -> str:
    """Return the last lines of a log, for failure.json."""
    if not path.exists():
        return ""
    text = path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
