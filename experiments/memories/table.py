"""The page's tables of losses, from the study's runs: `table.py STUDY_FOLDER [ONE/OTHER...]`

1. Bytes of a step between nodes, all ranks together, over the model's elements, as the ledger
   counted them; where the plan has others, that is an error. Without runs, the plan's. An arm of
   GONE has no plan any more, so its bytes are the ledger's alone. Gap and verdict are the
   report's; the range beside them is 95 % for that arm alone.
2. Arms against each other, paired by seed: 95 % over seeds alone, nothing corrected.
3. Ratios of two gaps to the baseline, with Fieller's 95 % interval over seeds (covariance counts).

With pairs of arms it prints 2 and 3 of these alone, of any study.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from zpp_lab.config.compose import compose
from zpp_lab.config.study import StudyConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.runs.reader import read_metrics
from zpp_lab.study.judge.stats import ratio_interval, t_interval
from zpp_lab.study.judge.verdict import ArmResult, StudyResult, read_result
from zpp_lab.study.report.render import markdown_table
from zpp_lab.study.words import NOTHING, gap_text, signed

VOCABULARY = 4096  # of the study's tokenizer: the text need not be there
GONE = ("mask_ef", "tagc")  # their codecs are not in zpp_lab any more
PAIRS = (
    *(("w4_256_symmetric", "w4_diff"), ("zeropp", "sdp4bit"), ("sdp4bit", "g4_remembered")),
    *(("g4_remembered", "g4_forgotten"), ("loco", "g4_forgotten"), ("loco", "g4_remembered")),
    *(("g2_remembered", "g2_forgotten"), ("g4_forgotten", "g2_remembered")),
    *(("g4_forgotten", f"g2_{way}") for way in ("asymmetric", "rotated", "both")),
    *(("g2_remembered", f"g2_{way}") for way in ("asymmetric", "rotated", "both")),
)
RATIOS = (
    *(("w4_diff", "w4_256_symmetric"), ("g2_remembered", "g2_forgotten")),
    ("g2_remembered", "g4_forgotten"),
)


def between(study: StudyConfig, arm: ArmResult) -> tuple[float, float]:
    """Bytes an element between nodes in a step: of weights, of gradients."""
    gone = arm.name in GONE
    config = compose([*study.overrides, *(() if gone else arm.arm.overrides)])
    model = build_model(config.model, VOCABULARY, "meta")
    counted = [row["bytes"] for run in arm.finished for row in read_metrics(run.dir)]
    if gone:
        wires = counted[0]
    else:
        moved = build_plan(model, config).step_bytes()
        wires = {wire: {"intra": sent.intra, "inter": sent.inter} for wire, sent in moved.items()}
    assert all(sent == wires for sent in counted)
    size = sum(p.numel() for p in model.parameters())
    gradients = sum(n["inter"] for wire, n in wires.items() if wire.startswith("grads"))
    return (sum(n["inter"] for n in wires.values()) - gradients) / size, gradients / size


def spread(values: Sequence[float]) -> str:
    low, high = t_interval(values, 0.95)
    return f"{signed((low + high) / 2)} ± {(high - low) / 2:.4f}"


def main() -> None:
    result = read_result(Path(sys.argv[1]))
    given = [(one, other) for one, _, other in (word.partition("/") for word in sys.argv[2:])]
    if not given:
        arms(result)
    gaps = {arm.name: arm.gaps for arm in result.every}
    rows = []
    for one, other in given or there(PAIRS, gaps):
        apart = [gaps[one][s] - gaps[other][s] for s in sorted({*gaps[one]} & {*gaps[other]})]
        rows.append([f"`{one}`", f"`{other}`", spread(apart), ", ".join(map(signed, apart))])
    print(markdown_table(["Arm", "less", "95 %, alone", "single seeds"], rows), end="\n\n")
    for one, other in given or there(RATIOS, gaps):
        seeds = sorted({*gaps[one]} & {*gaps[other]})
        both = [[gaps[arm][s] for s in seeds] for arm in (one, other)]
        try:
            bounds = "{:.2f} to {:.2f}".format(*ratio_interval(*both))
        except ValueError as error:
            bounds = str(error)
        print(f"{one} / {other}: {np.mean(both[0]) / np.mean(both[1]):.2f} ({bounds})")


def there(pairs: Sequence[tuple[str, str]], gaps: Mapping[str, object]) -> list[tuple[str, str]]:
    """Pairs of arms that have run."""
    return [pair for pair in pairs if all(gaps.get(arm) for arm in pair)]


def arms(result: StudyResult) -> None:
    rows = []
    for arm in result.every:
        alone = arm.gap.interval if arm.gap and arm.verdict != "baseline" else None
        ends = f"{signed(alone[0])} to {signed(alone[1])}" if alone else NOTHING
        weights, gradients = between(result.study, arm)
        sent = [f"{n:.2f}" for n in (weights, gradients, weights + gradients)]
        found = [gap_text(arm), ends, arm.verdict, str(len(arm.finished))]
        rows.append([f"`{arm.name}`", *sent, *found])
    columns = ["Arm", "weights", "gradients", "both", "Gap", "Alone", "Verdict", "Seeds"]
    print(markdown_table(columns, rows), end="\n\n")


if __name__ == "__main__":
    main()
