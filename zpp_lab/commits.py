"""Which commit made which steps of a run: one that is stopped may go on with other code.

summary.json names the commit of the last start; a run of several is no result of that one alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zpp_lab.files import damaged, parse_json, write_atomic

FILE = "commits.json"


def note_commit(folder: Path, step: int, commit: str | None) -> list[dict[str, Any]]:
    """Keep, beside the run, that the steps after `step` are made at `commit`.

    Returns all of them, oldest first: {"after": step, "commit": commit}. A commit of None is not
    known: the package lies in no checkout, or an older version began the run.
    """
    path, made = folder / FILE, []
    if step > 0:
        made = [one for one in _read(path) or [_from(0, None)] if one["after"] < step]
    if not made or made[-1]["commit"] != commit:
        made.append(_from(step, commit))
    write_atomic(path, json.dumps(made, indent=1) + "\n")
    return made


def _read(path: Path) -> list[dict[str, Any]]:
    """What it says, [] where there is no file; ValueError that names a damaged one."""
    try:
        made = parse_json(path)
    except FileNotFoundError:
        return []
    if not isinstance(made, list) or not all(isinstance(one, dict) for one in made):
        raise damaged(path, "no list of steps and commits")
    return made


def _from(step: int, commit: str | None) -> dict[str, Any]:
    return {"after": step, "commit": commit}
