"""How many arms of a study end decided, by its seeds: `power.py STUDY [FIRST:MOST:STEP]...`

FIRST seeds of each arm, then STEP more of the arms that are neither inside nor beyond the margin,
up to MOST (`max_seeds`, `seeds_per_look`); FIRST alone: no more. Without any: what the study says.

Runs that are kept count as they are; the others are drawn, and all are judged as the report judges
them, over seeds and held-out documents. A drawn gap is normal, by document with the mean and the
scatter of the arm's kept seeds, and no two arms share any; so this is the power at the gaps seen.
An arm with fewer than four kept seeds has the law's mean, or its own where the law says nothing,
and the scatter of the arm with so many seeds whose gap is nearest in size.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from law import cells, kept

from zpp_lab.config.compose import load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.claims import OPEN, UNDECIDED
from zpp_lab.study.judge.documents import DocumentGaps, Documents, Reader
from zpp_lab.study.judge.verdict import judge_study
from zpp_lab.study.run.launch import next_seeds
from zpp_lab.tools.plan import law

DRAWS = 10
ENOUGH = 4  # seeds that tell an arm's scatter


@dataclass(frozen=True)
class Gaps:
    """Of an arm. seen: what has run, nats by document [D] of each seed; mean, apart: of seeds that
    have not run, nats by document [D], and how those of ENOUGH seeds or more lie around it [S, D].
    """

    seen: Mapping[int, np.ndarray]
    mean: np.ndarray
    apart: np.ndarray

    def of(self, seed: int, draw: np.random.Generator) -> np.ndarray:
        if seed in self.seen:
            return self.seen[seed]
        weights = draw.normal(size=len(self.apart)) / math.sqrt(len(self.apart) - 1)
        return self.mean + weights @ self.apart


def of_arms(study: StudyConfig) -> tuple[dict[str, Gaps], np.ndarray, float]:
    """Of arms that are compared with the baseline, those of which runs or the law say something;
    the documents' tokens [D]; the baseline's loss. ValueError where no arm has seeds enough."""
    result = kept(study.name)
    told = {a.name: a.documents for a in result.arms if a.documents} if result else {}
    known = {arm: gaps for arm, gaps in told.items() if len(gaps.nats) >= ENOUGH}
    like = {
        arm.name: known[arm.name] for arm in study.arms if arm.role == "arm" and arm.name in known
    }
    if result is None or not like:
        raise ValueError(f"{study.name}: no arm has {ENOUGH} kept seeds, so no scatter is known")
    assert result.baseline.heldout_loss is not None, "arms have gaps to it"
    tokens = next(iter(like.values())).tokens
    published = law.load_law()
    law_says = {
        c.name: published.predict(c.errors, c.parameters, c.tokens, c.steps).gap
        for c in cells(study)
    }
    found = {}
    for arm in (arm.name for arm in study.arms if arm.role != "baseline"):
        own = told.get(arm)
        near, gap = known.get(arm), law_says.get(arm, _gap(own) if own else math.nan)
        if near is None and math.isnan(gap):
            print(f"{arm} is left out: no gap of it is kept, and the law says nothing of it")
            continue
        near = near or min(like.values(), key=lambda one: abs(_size(_gap(one)) - _size(gap)))
        rows = np.stack(list(near.nats.values()))
        mean = rows.mean(0) + (0 if arm in known else (gap - _gap(near)) * tokens)
        found[arm] = Gaps(own.nats if own else {}, mean, rows - rows.mean(0))
    return found, tokens, result.baseline.heldout_loss


def _gap(gaps: DocumentGaps) -> float:
    """Nats a token."""
    return float(fmean(nats.sum() for nats in gaps.nats.values()) / gaps.tokens.sum())


def _size(gap: float) -> float:
    return math.log(max(abs(gap), 1e-4))


def drawn(
    study: StudyConfig, gaps: Mapping[str, Gaps], tokens: np.ndarray, loss: float, seed: int
) -> Counter[str]:
    """Verdicts of a study so drawn, and under "runs" how many it took."""
    draw, runs, reader = np.random.default_rng(seed), {}, Reader()

    def add(arm: str, at: int) -> None:
        nats = loss * tokens + (gaps[arm].of(at, draw) if arm in gaps else 0.0)
        told = {"heldout_loss": float(nats.sum() / tokens.sum()), "bytes": {}}
        runs[arm, at] = Run(Path(arm, str(at)), arm, at, {}, told)
        reader.know(runs[arm, at], Documents("drawn", np.arange(len(tokens)), tokens, nats))

    for at in study.seeds:
        for name in (arm.name for arm in study.arms):
            add(name, at)
    while True:
        result = judge_study(study, list(runs.values()), reader=reader)
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
    gaps, tokens, loss = of_arms(study)
    arms = [arm for arm in study.arms if arm.name in gaps or arm.role == "baseline"]
    for plan in sys.argv[2:] or [f"{len(study.seeds)}:{study.max_seeds}:{study.seeds_per_look}"]:
        first, *more = map(int, plan.split(":"))
        most, step = more or (0, 1)
        seeds = list(range(1, first + 1))
        planned = replace(study, arms=arms, seeds=seeds, max_seeds=most, seeds_per_look=step)
        found = [drawn(planned, gaps, tokens, loss, seed) for seed in range(DRAWS)]
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
