"""How far runs end from their baseline, seed by seed: `pairs.py STEPS.csv...`

STEPS.csv is `zpp-lab export --steps` of the study of that name in this folder. Prints a Markdown
table, a row an arm and seed, in nats: the baseline's held-out loss after the last step, the arm's
gap to it, and of the training loss's gap the mean amount over the last 25 steps and the largest of
all, with its step.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from zpp_lab.config.compose import load_study
from zpp_lab.study.report.render import markdown_table

COLUMNS = ("Arm", "Seed", "Baseline", "Gap", "Last 25 steps", "Largest")
LAST = 25

Runs = dict[tuple[str, str], list[dict[str, str]]]  # by arm and seed: the steps' rows


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    print(markdown_table(COLUMNS, [row for name in sys.argv[1:] for row in rows(Path(name))]))
    return 0


def rows(path: Path) -> list[list[str]]:
    study = load_study(str(Path(__file__).with_name(f"{path.stem}.yaml")))
    runs: Runs = defaultdict(list)
    with path.open() as lines:
        for step in csv.DictReader(lines):
            runs[step["arm"], step["seed"]].append(step)
    against = {arm.name: arm.against or study.baseline for arm in study.arms}
    every = [arm.name for arm in study.arms if arm.role != "baseline"]
    pairs = [(arm, seed) for arm in every for seed in map(str, study.seeds) if (arm, seed) in runs]
    return [gap_row(arm, seed, runs[arm, seed], runs[against[arm], seed]) for arm, seed in pairs]


def gap_row(
    arm: str, seed: str, own: list[dict[str, str]], base: list[dict[str, str]]
) -> list[str]:
    gaps = [abs(float(a["loss"]) - float(b["loss"])) for a, b in zip(own, base, strict=True)]
    held = float(base[-1]["heldout_loss"])
    gap = float(own[-1]["heldout_loss"]) - held
    largest = f"{max(gaps):.4f} in step {gaps.index(max(gaps)) + 1}"
    signed = f"{gap:+.4f}".replace("-", "−")
    return [arm, seed, f"{held:.4f}", signed, f"{fmean(gaps[-LAST:]):.4f}", largest]


if __name__ == "__main__":
    sys.exit(main())
