"""How many arms of a study end decided, by its seeds: `power.py STUDY [FIRST:MOST:STEP]...`

FIRST seeds of each arm, then STEP more of the arms that are neither inside nor beyond the margin,
up to MOST (`max_seeds`, `seeds_per_look`); FIRST alone: no more. Without any: what the study says.

Studies are drawn and judged as the report judges them, over seeds alone. An arm's gaps by seed are
normal. With four kept seeds or more their mean and scatter are the measured ones; else the mean is
the law's, and the scatter that of the arm with so many seeds whose gap is nearest in size. Whether
arms are decided is what is asked, so nothing here looks at who is.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from law import VOCABULARY, kept, kept_gaps

from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.claims import UNDECIDED
from zpp_lab.study.judge.verdict import judge_study
from zpp_lab.study.run.launch import next_seeds
from zpp_lab.study.run.plan import Planner
from zpp_lab.tools.plan import law

DRAWS = 40
ENOUGH = 4  # seeds that tell an arm's scatter
SHAM = {"sham_w4": "w4_256_symmetric"}  # no codec of its own: as large an error


class Noise(NamedTuple):
    mean: float  # nats a token
    scatter: float  # standard deviation over seeds


def of_arms(study: StudyConfig) -> dict[str, Noise]:
    """Of arms that are compared with the baseline, those of which runs or the law say something."""
    gaps = kept_gaps(study.name)
    known = {arm: v for arm, v in gaps.items() if len(v) >= ENOUGH and any(v)}
    found = {arm: Noise(fmean(v), stdev(v)) for arm, v in known.items()}
    rest = [a.name for a in study.arms if a.role != "baseline" and a.name not in known]
    for arm, law_says in predictions(study, rest):
        if law_says is None and arm not in gaps:
            print(f"{arm} is left out: it has no run, and the law says nothing of it")
            continue
        mean = fmean(gaps[arm]) if law_says is None else law_says
        near = min(known, key=lambda name: abs(_size(fmean(known[name])) - _size(mean)))
        found[arm] = Noise(mean, stdev(known[near]))
    return found


def predictions(study: StudyConfig, arms: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    """Of each arm the law's gap; None where it says nothing."""
    with tempfile.TemporaryDirectory() as nowhere:
        planner = Planner(study, Path(nowhere), compose)
        for arm in arms:
            (run,) = planner.plan({SHAM.get(arm, arm): study.seeds[:1]})
            model = build_model(run.config.model, VOCABULARY, "meta")
            told = law.predicted(run.config, build_plan(model, run.config))
            yield arm, told.gap if told else None


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
    assert result is not None, "kept_gaps found its runs"
    arms = [arm for arm in study.arms if arm.name in noise or arm.role == "baseline"]
    loss = fmean(r.heldout_loss for r in result.baseline.finished if r.heldout_loss is not None)
    for plan in sys.argv[2:] or [f"{len(study.seeds)}:{study.max_seeds}:{study.seeds_per_look}"]:
        first, most, step = [*map(int, plan.split(":")), 0, 1][:3]
        seeds = list(range(1, first + 1))
        planned = replace(study, arms=arms, seeds=seeds, max_seeds=most, seeds_per_look=step)
        found = [drawn(planned, noise, loss, seed) for seed in range(DRAWS)]
        judged = sum(found[0].values()) - found[0]["runs"]
        decided = sorted(1 - one[UNDECIDED] / judged for one in found)
        print(
            f"{plan}: of {judged} arms {fmean(decided):.0%} decided ({decided[0]:.0%} to "
            f"{decided[-1]:.0%} in {DRAWS} draws), {fmean(one['runs'] for one in found):.0f} runs",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
