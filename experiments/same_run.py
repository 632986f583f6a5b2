"""Are two run folders the same run to the bit? `same_run.py ONE OTHER` ends with 0 when they are.

Compared are all lines of metrics.jsonl without times, the held-out losses by document and the
summaries' results. What runs of older commits did not write, accuracy among it, is compared where
both have it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zpp_lab.runs.metrics import unmeasured

NEWER = ("heldout_accuracy", "correct", "bytes")  # the last two in heldout.json
RESULTS = ("steps", "loss", "heldout_loss", "heldout_loss_master", "tokens", "bytes")


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [unmeasured(json.loads(line)) for line in text]


def differing(one: dict[str, Any], other: dict[str, Any], newer: tuple[str, ...]) -> list[str]:
    """Keys whose values differ, but for those of `newer` that only one has."""
    shared = one.keys() & other.keys()
    keys = [k for k in one.keys() | other.keys() if k in shared or k not in newer]
    return sorted(k for k in keys if one.get(k) != other.get(k))


def differences(one: Path, other: Path) -> list[str]:
    """What differs, the earliest step first."""
    found = []
    a, b = lines(one), lines(other)
    if len(a) != len(b):
        found.append(f"{len(a)} steps and {len(b)}")
    for x, y in zip(a, b, strict=False):
        if keys := differing(x, y, NEWER[:1]):
            found.append(f"step {x['step']}: {', '.join(keys)}")
            break
    h, k = (json.loads((folder / "heldout.json").read_text()) for folder in (one, other))
    found += ["heldout.json"] if differing(h, k, NEWER[1:]) else []
    s, t = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    return found + [f"summary: {key}" for key in RESULTS if s[key] != t[key]]


def main() -> int:
    one, other = map(Path, sys.argv[1:3])
    found = differences(one, other)
    for line in found:
        print(f"differs: {line}")
    if not found:
        last = lines(one)[-1]
        print(f"equal to the bit: {last['step']} steps, last loss {last['loss']!r}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
