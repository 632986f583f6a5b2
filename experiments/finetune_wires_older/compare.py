"""What the arms of two studies cost that differ in their base:
`compare.py YOUNG_FOLDER OLDER_FOLDER`

Folders with a runs.tar.xz. Prints three Markdown tables of the arms of which two or more seeds
finished in both, losses in nats. Gaps are to plain ZeRO-3 (the arm zero3) with the same seed,
differences the older base's gaps minus the young one's, paired by seed; ± is half of the 95 %
interval over the seeds.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.report.render import markdown_table
from zpp_lab.study.words import NOTHING

BASELINE = "zero3"
WIRES = {"weights": "weights_forward", "gradients": "grads_intra"}
CLASSES = ("attention", "mlp", "head")
Value = Callable[["Study", str, str], float]  # of an arm's run with a seed


class Study:
    """The finished runs of a study, by arm and seed: each step's record, and the summary."""

    def __init__(self, folder: Path) -> None:
        self.steps: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
        self.summary: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        with tarfile.open(folder / "runs.tar.xz") as packed:
            for member in packed:
                path = PurePath(member.name)
                arm, seed = path.parts[-3:-1] if len(path.parts) > 3 else ("", "")
                if not seed.startswith("seed") or (file := packed.extractfile(member)) is None:
                    continue
                if path.name == "metrics.jsonl":
                    self.steps[arm][seed] = [json.loads(line) for line in file]
                elif path.name == "summary.json":
                    self.summary[arm][seed] = json.load(file)

    def looks(self) -> list[int]:
        """The steps after which there was a held-out loss."""
        records = next(iter(self.steps[BASELINE].values()))
        return [one["step"] for one in records if "heldout_loss" in one]

    def gap(self, arm: str, seed: str, step: int, key: str = "heldout_loss") -> float:
        own, base = (self.steps[name][seed][step - 1] for name in (arm, BASELINE))
        return own[key] - base[key]

    def mean_gap(self, arm: str, seed: str) -> float:
        """The training loss's, over all steps."""
        steps = len(self.steps[BASELINE][seed])
        return fmean(self.gap(arm, seed, step, "loss") for step in range(1, steps + 1))

    def end(self, arm: str, seed: str) -> float:
        return self.gap(arm, seed, self.looks()[-1])

    def share(self, arm: str, seed: str) -> float:
        """The last gap in % of the baseline's loss."""
        return 100 * self.end(arm, seed) / self.summary[BASELINE][seed]["heldout_loss"]

    def masters(self, arm: str, seed: str) -> float:
        """How much worse the fp32 masters are than what the wires bring of them."""
        one = self.summary[arm][seed]
        return one["heldout_loss_master"] - one["heldout_loss"]

    def nmse(self, arm: str, wire: str) -> str:
        """Of each class, mean over the steps that were looked at, and over seeds."""
        records = [one for runs in self.steps[arm].values() for one in runs if "telemetry" in one]
        told = [one["telemetry"][wire] for one in records]
        means = [fmean(one[kind]["nmse"] for one in told) for kind in CLASSES]
        return ", ".join(f"{mean:.3g}" for mean in means) if any(means) else NOTHING


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    young, older = (Study(Path(folder)) for folder in sys.argv[1:])
    for table in (gaps, along, errors):
        print(table(young, older), end="\n\n")
    return 0


def shared(young: Study, older: Study) -> dict[str, list[str]]:
    """The seeds that an arm finished in both."""
    arms = sorted(set(young.summary) & set(older.summary) - {BASELINE})
    both = {arm: sorted(set(young.summary[arm]) & set(older.summary[arm])) for arm in arms}
    return {arm: seeds for arm, seeds in both.items() if len(seeds) > 1}


def gaps(young: Study, older: Study) -> str:
    """Held out after the last step, in nats and as a share of the loss; then over all steps."""
    kinds: list[tuple[Value, int]] = [(Study.end, 4), (Study.share, 2), (Study.mean_gap, 4)]
    columns = ["Arm"]
    for kind in ("last gap", "% of the loss", "all steps"):
        columns += [f"{kind}: young", "older", "difference"]
    rows = []
    for arm, seeds in shared(young, older).items():
        cells = [arm]
        for value, digits in kinds:
            first, second = ([value(one, arm, seed) for seed in seeds] for one in (young, older))
            apart = [b - a for a, b in zip(first, second, strict=True)]
            cells += [spread(values, digits) for values in (first, second, apart)]
        rows.append(cells)
    return markdown_table(columns, rows)


def along(young: Study, older: Study) -> str:
    """Step 1, where nothing but rounding has happened, by seed; held out; the masters' own gap."""
    looks = older.looks()
    rows = []
    for arm, seeds in shared(young, older).items():
        for base, one in (("young", young), ("older", older)):
            first = ", ".join(signed(one.gap(arm, seed, 1, "loss"), 4) for seed in seeds)
            means = [fmean(one.gap(arm, seed, look) for seed in seeds) for look in looks]
            means.append(fmean(one.masters(arm, seed) for seed in seeds))
            rows.append([arm, base, first, *(signed(mean, 4) for mean in means)])
    held_out = [f"held out at {look}" for look in looks]
    return markdown_table(["Arm", "Base", "step 1, by seed", *held_out, "masters"], rows)


def errors(young: Study, older: Study) -> str:
    """NMSE of gathered weights, and of gradients on the first hop."""
    rows = []
    for arm in shared(young, older):
        for base, one in (("young", young), ("older", older)):
            cells = [one.nmse(arm, wire) for wire in WIRES.values()]
            rows += [[arm, base, *cells]] if set(cells) != {NOTHING} else []
    columns = [f"{name}: {', '.join(CLASSES)}" for name in WIRES]
    return markdown_table(["Arm", "Base", *columns], rows)


def spread(values: Sequence[float], digits: int) -> str:
    low, high = t_interval(values, 0.95)
    return f"{signed(fmean(values), digits)} ± {(high - low) / 2:.{digits}f}"


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


if __name__ == "__main__":
    sys.exit(main())
