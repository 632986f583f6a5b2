"""How many arms of a study end decided, by its seeds: `power.py STUDY [FIRST:MOST:STEP]...`

FIRST seeds of each arm, then STEP more of the arms that are neither inside nor beyond the margin,
up to MOST (`max_seeds`, `seeds_per_look`); FIRST alone: no more. Without any: what the study says.

Studies are drawn and judged as the report judges them, over seeds alone. An arm's gaps by seed are
normal, and no two arms share any. With four kept seeds or more their mean and scatter are the
measured ones, so this is the power at the gaps seen. Else the mean is the law's, and the scatter
that of the arm with so many seeds whose gap is nearest in size, or of half of them if that is more.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np
from law import cells, kept, kept_gaps

from zpp_lab.config.compose import load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.claims import OPEN, UNDECIDED
from zpp_lab.study.judge.verdict import judge_study
from zpp_lab.study.run.launch import next_seeds
from zpp_lab.tools.plan import law

DRAWS = 40
ENOUGH = 4  # seeds that tell an arm's scatter
SHAM = {"sham_w4": "w4_256_symmetric"}  # no codec of its own: as large an error


class Noise(NamedTuple):
    mean: float  # nats a token
    scatter: float  # standard deviation over seeds


def of_arms(study: StudyConfig) -> dict[str, Noise]:
    """Of arms that are compared with the baseline, those of which runs or the law say something.
    ValueError where no arm has seeds enough."""
    gaps = kept_gaps(study.name)
    known = {arm: Noise(fmean(v), stdev(v)) for arm, v in gaps.items() if len(v) >= ENOUGH}
    like = [known[arm.name] for arm in study.arms if arm.role == "arm" and arm.name in known]
    if not like:
        raise ValueError(f"{study.name}: no arm has {ENOUGH} kept seeds, so no scatter is known")
    usual, published = median(noise.scatter for noise in like), law.load_law()
    told = {c.name: published.predict(c.errors, c.parameters, c.tokens).gap for c in cells(study)}
    for arm in (arm.name for arm in study.arms if arm.role != "baseline"):
        mean = told.get(SHAM.get(arm, arm), fmean(gaps.get(arm, [math.nan])))
        if arm in known:
            continue
        if math.isnan(mean):
            print(f"{arm} is left out: it has no run, and the law says nothing of it")
            continue
        near = min(like, key=lambda noise: abs(_size(noise.mean) - _size(mean)))
        known[arm] = Noise(mean, max(usual, near.scatter))
    return known


def _size(gap: float) -> float:
    return math.log(max(abs(gap), 1e-4))


def drawn(study: StudyConfig, noise: Mapping[str, Noise], loss: float, seed: int) -> Counter[str]:
    """Verdicts of a study so drawn, and under "runs" how many it took."""
    draw, runs = np.random.default_rng(seed), {}

    def add(arm: str, at: int) -> None:
        gap = draw.normal(*noise[arm]) if arm in noise else 0.0
        runs[arm, at] = Run(Path(arm), arm, at, {}, {"heldout_loss": loss + gap, "bytes": {}})

    for at in study.seeds:
        for name in (arm.name for arm in study.arms):
            add(name, at)
    while True:
        result = judge_study(study, list(runs.values()))
        more = [(name, at) for name, seeds in next_seeds(study, result).items() for at in seeds]
        if not more:
            break
        for name, at in more:
            add(name, at)
    verdicts = Counter(a.verdict for a in result.arms if a.arm.role == "arm")
    return verdicts + Counter({"runs": len(runs)})


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    study = load_study(sys.argv[1])
    noise, result = of_arms(study), kept(study.name)
    assert result is not None, "it has gaps"
    arms = [arm for arm in study.arms if arm.name in noise or arm.role == "baseline"]
    loss = fmean(r.heldout_loss for r in result.baseline.finished if r.heldout_loss is not None)
    for plan in sys.argv[2:] or [f"{len(study.seeds)}:{study.max_seeds}:{study.seeds_per_look}"]:
        first, *more = map(int, plan.split(":"))
        most, step = more or (0, 1)
        seeds = list(range(1, first + 1))
        planned = replace(study, arms=arms, seeds=seeds, max_seeds=most, seeds_per_look=step)
        found = [drawn(planned, noise, loss, seed) for seed in range(DRAWS)]
        judged = sum(found[0].values()) - found[0]["runs"]
        told, closed = (
            [1 - sum(one[verdict] for verdict in left) / judged for one in found]
            for left in ((UNDECIDED,), OPEN)
        )
        print(
            f"{plan}: of {judged} arms {fmean(told):.0%} end otherwise than undecided "
            f"({min(told):.0%} to {max(told):.0%} in {DRAWS} draws), {fmean(closed):.0%} inside or "
            f"beyond the margin; {fmean(one['runs'] for one in found):.0f} runs",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
