"""How far runs are from their baseline in each part of training:
`windows.py RESULTS.csv STEP... [--against ARM]`

RESULTS.csv has a row a step (publish.py, or `zpp-lab export --steps`). Prints a Markdown table of
the training loss's gap in nats, a row an arm: its mean and its largest amount in steps 1 to the
first STEP, from the next one to the second STEP, and so on to the end, over all seeds. `--against`:
to the runs of that arm, seed by seed, in place of the baseline's.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from zpp_lab.study.report.render import markdown_table
from zpp_lab.study.words import NOTHING

Gaps = dict[str, list[tuple[int, float]]]  # of an arm, each with its step


def main() -> int:
    words, other = sys.argv[1:], None
    if "--against" in words[:-1]:
        at = words.index("--against")
        other = words[at + 1]
        del words[at : at + 2]
    if not words or not all(word.isdecimal() for word in words[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    arms = against(Path(words[0]), other) if other else gaps(Path(words[0]))
    if not arms:
        print(f"{words[0]}: no arm has a gap{f' to {other}' if other else ''}", file=sys.stderr)
        return 1
    last = max(step for rows in arms.values() for step, _ in rows)
    ends = sorted({0, last, *(int(word) for word in words[1:] if int(word) < last)})
    windows = list(pairwise(ends))
    columns = ["Arm", *(f"steps {first + 1} to {end}" for first, end in windows)]
    rows = [[arm, *(spread(found, *w) for w in windows)] for arm, found in arms.items()]
    print(markdown_table(columns, rows))
    return 0


def gaps(results: Path) -> Gaps:
    """The gaps of the arms that have any, in the file's order; the baseline's own are left out."""
    found: Gaps = defaultdict(list)
    with results.open() as lines:
        for row in csv.DictReader(lines):
            if row["gap"]:
                found[row["arm"]].append((int(row["step"]), float(row["gap"])))
    return {arm: rows for arm, rows in found.items() if any(gap for _, gap in rows)}


def against(results: Path, other: str) -> Gaps:
    """Gaps to the runs of arm `other` with the same seed, of the steps that both have."""
    losses: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    with results.open() as lines:
        for row in csv.DictReader(lines):
            losses[row["arm"]][row["seed"], int(row["step"])] = float(row["loss"])
    theirs = losses.pop(other, {})
    found = {
        arm: [(at[1], loss - theirs[at]) for at, loss in own.items() if at in theirs]
        for arm, own in losses.items()
    }
    return {arm: rows for arm, rows in found.items() if rows}


def spread(rows: list[tuple[int, float]], before: int, end: int) -> str:
    inside = [gap for step, gap in rows if before < step <= end]
    if not inside:
        return NOTHING
    return f"{fmean(inside):+.4f}, at most {max(map(abs, inside)):.4f}".replace("-", "−")


if __name__ == "__main__":
    sys.exit(main())
