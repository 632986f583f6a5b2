"""Norms of the gradients of a study's runs, before clipping: `norms.py RESULTS.csv`

RESULTS.csv has a row a step (publish.py). Prints a Markdown table, a row an arm: the median over
seeds at the first and the last step, the median over seeds and steps from the 21st on (where the
schedule's warm-up has ended), and how many steps of all seeds were clipped to 1 or had an infinite
norm, after which DeepSpeed changes no weight.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from zpp_lab.study.report.render import markdown_table

COLUMNS = ("Arm", "step 1", "steps 21 on", "last step", "clipped", "infinite", "steps")
CLIP, WARM = 1.0, 20  # train.clip and train.warmup_steps of the study
Norms = dict[str, list[tuple[int, float]]]  # of an arm, each with its step


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    arms = norms(Path(sys.argv[1]))
    print(markdown_table(COLUMNS, [cells(arm, found) for arm, found in arms.items()]))
    return 0


def norms(results: Path) -> Norms:
    found: Norms = defaultdict(list)
    with results.open() as lines:
        for row in csv.DictReader(lines):
            found[row["arm"]].append((int(row["step"]), float(row["grad_norm"])))
    return found


def cells(arm: str, found: list[tuple[int, float]]) -> list[str]:
    last = max(step for step, _ in found)

    def middle(first: int, end: int) -> str:
        return f"{median(norm for step, norm in found if first <= step <= end):.4g}"

    infinite = sum(math.isinf(norm) for _, norm in found)
    clipped = sum(norm > CLIP for _, norm in found) - infinite
    steps = [middle(1, 1), middle(WARM + 1, last), middle(last, last)]
    return [arm, *steps, str(clipped), str(infinite), str(len(found))]


if __name__ == "__main__":
    sys.exit(main())
