"""The failed starts of a run, and whether another start is worth it.

failure.json tells the last one only, and a start removes it; `attempts.jsonl` beside it keeps
them all: one line a failed start, with its outcome, error and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zpp_lab.study.runs import read_json
from zpp_lab.tracking.jsonl import from_json, to_json

FILE = "attempts.jsonl"
Attempt = Mapping[str, Any]


def attempts(folder: Path) -> list[Attempt]:
    """The failed starts, oldest first; a failure.json that nobody noted counts as one."""
    found = [one for line in _text(folder).splitlines() if (one := _attempt(line)) is not None]
    if not found and (last := read_json(folder / "failure.json")) is not None:
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
    """Why a failed run is not started again, None when it is.

    A divergence repeats itself: the run is deterministic. A crash or a lack of memory may not,
    and is tried again `retries` times.
    """
    failed = attempts(folder)
    if not failed:
        return None
    if failed[-1].get("outcome") == "diverged":
        return "it diverged, and would again"
    if len(failed) > retries:
        return f"it failed {len(failed)} times"
    return None


def ran_out_of_memory(folder: Path) -> bool:
    failed = attempts(folder)
    return bool(failed) and failed[-1].get("outcome") == "out_of_memory"
