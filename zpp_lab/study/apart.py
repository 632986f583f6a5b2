"""Steps in which one run's gradient stands apart from its twins'.

Runs of one seed have the same tokens, so the norms of their gradients go up and down together,
whatever their recipes. Where one of them jumps alone, for a step, there is a reason: a text on
which the model is at an edge, or a fault. What comes after it in that run is partly that step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from zpp_lab.study.runs import read_metrics
from zpp_lab.study.verdict import StudyResult

TIMES = 2.0  # what the other runs say, corrected by how it is in the steps around
AROUND = 3  # steps before and after
TWINS = 2  # other runs that it takes
NAMED = 6  # steps in a report's sentence

Norms = Mapping[int, float]  # by step


@dataclass(frozen=True)
class ApartStep:
    """norm: of this run's gradient before clipping; others: the median of its twins'."""

    arm: str
    seed: int
    step: int
    norm: float
    others: float

    @property
    def text(self) -> str:
        return (
            f"{self.arm} seed {self.seed} step {self.step} ({self.norm:.3g} for {self.others:.3g})"
        )


def apart_steps(result: StudyResult) -> list[ApartStep]:
    """Those of all runs but a negative control's, the furthest apart first."""
    arms = [arm for arm in result.arms if arm.arm.role != "negative_control"]
    found: list[ApartStep] = []
    for seed in sorted({seed for arm in arms for seed in arm.runs}):
        runs = {arm.name: arm.runs[seed] for arm in arms if seed in arm.runs}
        norms = {name: _norms(read_metrics(run.dir)) for name, run in runs.items()}
        for name in norms:
            found += _of_run(name, seed, norms)
    return sorted(found, key=lambda one: one.others / one.norm)


def apart_lines(steps: Sequence[ApartStep]) -> list[str]:
    """A sentence for a report, none without such steps."""
    if not steps:
        return []
    many = len(steps) > NAMED
    runs = len({(one.arm, one.seed) for one in steps})
    named = ", ".join(one.text for one in steps[:NAMED])
    return [
        f"Steps that stand apart: in {_count(len(steps), 'step')} of {_count(runs, 'run')} the "
        f"norm of the gradient was at least {TIMES:g} times what the other runs of that seed say, "
        "which have the same tokens and agree in the steps around it: "
        f"{'the furthest ' if many else ''}{named}. What follows such a step in a run is partly "
        "that step's, whatever its recipe. `zpp-lab batch RUN STEP` shows its text."
    ]


def _norms(rows: Sequence[Mapping[str, object]]) -> Norms:
    """Of steps whose norm is a positive number; a line may be cut short."""
    found = {row.get("step"): row.get("grad_norm") for row in rows}
    return {
        step: float(norm)
        for step, norm in found.items()
        if isinstance(step, int) and isinstance(norm, int | float) and 0 < norm < float("inf")
    }


def _of_run(name: str, seed: int, norms: Mapping[str, Norms]) -> Iterator[ApartStep]:
    others = {step: _others(name, step, norms) for step in norms[name]}
    ratios = {s: norms[name][s] / other for s, other in others.items() if other is not None}
    for step, ratio in ratios.items():
        near = [
            ratios[s] for s in range(step - AROUND, step + AROUND + 1) if s in ratios and s != step
        ]
        other = others[step]
        if near and other is not None and ratio >= TIMES * median(near):
            yield ApartStep(name, seed, step, norms[name][step], other)


def _others(name: str, step: int, norms: Mapping[str, Norms]) -> float | None:
    """The median of the twins' norms of a step; None of too few."""
    found = [own[step] for arm, own in norms.items() if arm != name and step in own]
    return median(found) if len(found) >= TWINS else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
