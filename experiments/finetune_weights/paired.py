"""What a codec on weights gains over the plain one of as many bits, run by run: `paired.py FOLDER`

FOLDER has the study's runs.tar.xz and rounded.csv. Prints three Markdown tables, losses in nats a
token, ± half of the 95 % interval over the seeds, nothing corrected for the number of arms:

1. an arm's gap minus that of the plain arm of its bits (w4, w2), paired by seed, held out after the
   last step and the training loss's over all steps; and its bytes as a share of the plain arm's;
2. an arm's gap, that of the baseline rounded to nearest with the arm's codec after training, and
   the one minus the other, paired by seed; each is to the baseline's loss of its own evaluation;
3. NMSE of gathered weights by class; then the gap in step 1, which is rounding alone, held out
   after steps, and how much worse the fp32 masters are than what the wires bring of them.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "finetune_wires_older"))

from compare import BASELINE, CLASSES, WIRES, Study, signed, spread

from zpp_lab.study.judge.stats import p_values
from zpp_lab.study.report.render import markdown_table
from zpp_lab.study.words import NOTHING

CONTROLS = (BASELINE, "zero3_reordered", "broken")
Rounded = dict[str, dict[str, float]]  # the baseline's gap by arm and seed, once it is rounded


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    study = Study(folder)
    for table in (codecs(study), afterwards(study, rounded(folder)), errors(study)):
        print(table, end="\n\n")
    return 0


def plain(arm: str) -> str:
    """The arm with as many bits and nothing else."""
    return arm.split("_")[0]


def arms(study: Study) -> list[str]:
    """By bits, most first; the plain one before the others."""
    found = sorted(set(study.summary) - set(CONTROLS))
    return sorted(found, key=lambda arm: (-int(plain(arm)[1:]), arm))


def codecs(study: Study) -> str:
    """The first table, of the arms that are more than their bits."""
    rows = []
    for arm in arms(study):
        other = plain(arm)
        if other == arm or other not in study.summary:
            continue
        seeds = sorted(set(study.summary[arm]) & set(study.summary[other]))
        last = [study.end(arm, seed) - study.end(other, seed) for seed in seeds]
        steps = [study.mean_gap(arm, seed) - study.mean_gap(other, seed) for seed in seeds]
        each = ", ".join(signed(gap, 4) for gap in last)
        sent = [study.summary[one][seeds[0]]["bytes_per_step"] for one in (arm, other)]
        more = f"{100 * sent[0] / sent[1]:.1f}%"
        rows.append([arm, other, more, spread(last, 4), each, chance(last), spread(steps, 4)])
    columns = ["Arm", "minus", "its bytes", "last gap", "single seeds", "p", "all steps"]
    return markdown_table(columns, rows)


def chance(values: list[float]) -> str:
    """Of the paired t test that the mean is 0, for this arm alone."""
    tests = p_values(values, 1.0)
    if tests is None:
        return NOTHING
    return "< 0.0001" if tests.differs < 5e-5 else f"{tests.differs:.4f}"


def rounded(folder: Path) -> Rounded:
    found: Rounded = defaultdict(dict)
    with (folder / "rounded.csv").open() as lines:
        for row in csv.DictReader(lines):
            gap = float(row["rounded_loss"]) - float(row["baseline_loss"])
            found[row["arm"]][f"seed{row['seed']}"] = gap
    return found


def afterwards(study: Study, found: Rounded) -> str:
    """The second table."""
    rows = []
    for arm in (arm for arm in arms(study) if arm in found):
        own = {seed: study.end(arm, seed) for seed in found[arm]}
        apart = [own[seed] - found[arm][seed] for seed in sorted(own)]
        each = ", ".join(signed(gap, 4) for gap in apart)
        kinds = (list(own.values()), list(found[arm].values()), apart)
        rows.append([arm, *(spread(values, 4) for values in kinds), each, chance(apart)])
    columns = ["Arm", "trained with it", "rounded afterwards", "difference", "single seeds", "p"]
    return markdown_table(columns, rows)


def errors(study: Study) -> str:
    """The third table."""
    looks, rows = study.looks(), []
    for arm in arms(study):
        seeds = sorted(study.summary[arm])
        first = ", ".join(signed(study.gap(arm, seed, 1, "loss"), 4) for seed in seeds)
        means = [fmean(study.gap(arm, seed, look) for seed in seeds) for look in looks]
        means.append(fmean(study.masters(arm, seed) for seed in seeds))
        cells = [study.nmse(arm, WIRES["weights"]), first, *(signed(mean, 4) for mean in means)]
        rows.append([arm, *cells])
    held_out = [f"held out at {look}" for look in looks]
    return markdown_table(
        ["Arm", f"NMSE: {', '.join(CLASSES)}", "step 1, by seed", *held_out, "masters"], rows
    )


if __name__ == "__main__":
    sys.exit(main())
