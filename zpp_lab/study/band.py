"""The noise band: how far a run strays when nothing but the order of its sums has changed.

A study with one seed has no test and no interval. Its order control says at least what nothing
looks like: an arm whose gap is no larger shows nothing, one far beyond it shows something. One draw
of the noise is little; several seeds have a noise floor of their own (`noise.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zpp_lab.study.runs import Run, read_metrics
from zpp_lab.study.table import signed
from zpp_lab.study.verdict import ArmResult, StudyResult

Points = Mapping[int, float]  # step → gap in nats
Row = dict[str, Any]
_NEAR = 20  # a training loss's band at a step: the largest within this part of the run, each side


def band_lines(result: StudyResult) -> list[str]:
    """Sentences for each baseline with one finished seed, on what its arms' gaps are worth."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline" and len(arm.finished) == 1]
    return [line for base in bases for line in _of(result, base)]


def noise_of(result: StudyResult, base: ArmResult) -> float | None:
    """The largest held-out gap of the order controls of `base` in the second half of training, in
    nats; None without one. The last gap alone would be 0 wherever two curves happen to cross."""
    gaps = [
        abs(gap)
        for arm in result.arms
        if arm.arm.role == "order_control" and result.baseline_of(arm).name == base.name
        for seed, last in arm.gaps.items()
        for gap in (last, *_late_gaps(arm.runs[seed], base.runs[seed]))
    ]
    return max(gaps, default=None)


def _late_gaps(run: Run, base: Run) -> list[float]:
    """At the evaluations of the second half, where both losses are finite."""
    mine, theirs = (_evaluations(read_metrics(one.dir)) for one in (run, base))
    last = max(mine, default=0)
    both = [step for step in mine if step in theirs and 2 * step > last]
    return [gap for step in both if math.isfinite(gap := mine[step] - theirs[step])]


def _evaluations(rows: Sequence[Row]) -> dict[int, float]:
    return {row["step"]: row["heldout_loss"] for row in rows if row.get("heldout_loss") is not None}


def _of(result: StudyResult, base: ArmResult) -> list[str]:
    arms = [
        arm
        for arm in result.arms
        if arm.gaps and arm.verdict != "baseline" and result.baseline_of(arm).name == base.name
    ]
    tested = [arm for arm in arms if arm.arm.role != "order_control"]
    if not tested:
        return []
    noise = noise_of(result, base)
    if noise is None:
        return [
            f"{base.name} has one seed, so nothing is tested, and no order control beside it "
            f"says how large a gap noise makes. {_elsewhere(result)}"
        ]
    control = next(arm.name for arm in arms if arm.arm.role == "order_control")
    if noise == 0.0:
        return [
            f"{base.name} has one seed, so nothing is tested, and {control} equals it in every "
            f"digit: its order of sums changed nothing, so it says nothing of noise. "
            f"{_elsewhere(result)}"
        ]
    return [
        f"{base.name} has one seed, so nothing is tested. {control}, in which only the order of "
        f"sums differs, strays up to {_nats(noise)} nats from it in the second half of training: "
        f"the noise band, from one draw of the noise. {_sides(tested, noise)}"
    ]


def _elsewhere(result: StudyResult) -> str:
    """What the controls of other baselines say, or what would help."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline"]
    known = {b.name: n for b in bases if (n := noise_of(result, b))}
    if not known:
        return "More seeds would, or an order control."
    said = [f"{_nats(noise)} nats from {name}" for name, noise in known.items()]
    return f"The nearest to it: order controls stray up to {', '.join(said)}."


def _sides(arms: Sequence[ArmResult], noise: float) -> str:
    """Which arms lie inside the band and which beyond it, with their gaps."""
    gaps = {arm.name: next(iter(arm.gaps.values())) for arm in arms}
    inside = [f"{n} ({signed(g)})" for n, g in gaps.items() if abs(g) <= noise]
    beyond = [f"{n} ({_beyond(g, noise)})" for n, g in gaps.items() if abs(g) > noise]
    parts = {"Inside it": inside, "Beyond it": beyond}
    return " ".join(f"{what}: {', '.join(names)}." for what, names in parts.items() if names)


def _beyond(gap: float, noise: float) -> str:
    return f"{signed(gap)}, {abs(gap) / noise:,.1f} times"


def _nats(noise: float) -> str:
    return f"{noise:.4f}" if noise >= 1e-4 else f"{noise:.1e}"


# ---------------------------------------------------------------------- over training


def training_band(controls: Sequence[Points], points: Iterable[int]) -> list[Row]:
    """± the largest gap of the controls near each of `points`; [] without controls.

    One step's gap crosses 0 now and then, which is no sign of less noise: hence "near".
    """
    steps = [step for run in controls for step in run]
    reach = max(1, max(steps, default=0) // _NEAR)
    return _rows({at: _largest(controls, at - reach, at + reach) for at in sorted(points)})


def heldout_band(controls: Sequence[Points], points: Iterable[int]) -> list[Row]:
    """± the largest gap of the controls at each of `points`, which are evaluations."""
    return _rows({at: _largest(controls, at, at) for at in sorted(points)})


def _largest(controls: Sequence[Points], first: int, last: int) -> float | None:
    found = [abs(run[step]) for run in controls for step in range(first, last + 1) if step in run]
    return max(found, default=None)


def _rows(found: Mapping[int, float | None]) -> list[Row]:
    return [{"step": s, "low": -v, "high": v} for s, v in found.items() if v is not None]
