"""Are two run folders the same run to the bit? `same_run.py ONE OTHER` ends with 0 when they are.

Compared are all lines of metrics.jsonl without times, the held-out losses by document and the
summaries' results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zpp_lab.runs.metrics import unmeasured

RESULTS = ("steps", "loss", "heldout_loss", "heldout_loss_master", "tokens", "bytes")


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [unmeasured(json.loads(line)) for line in text]


def differences(one: Path, other: Path) -> list[str]:
    """What differs, the earliest step first."""
    found = []
    a, b = lines(one), lines(other)
    if len(a) != len(b):
        found.append(f"{len(a)} steps and {len(b)}")
    for x, y in zip(a, b, strict=False):
        keys = [k for k in sorted(set(x) | set(y)) if x.get(k) != y.get(k)]
        if keys:
            found.append(f"step {x['step']}: {', '.join(keys)}")
            break
    if (one / "heldout.json").read_bytes() != (other / "heldout.json").read_bytes():
        found.append("heldout.json")
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
