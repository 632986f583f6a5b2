"""From run folders to one verdict an arm.

The rule, for the paired gaps of an arm (its held-out loss minus the baseline's
of the same seed) and a margin in nats:

- **on par**: two one-sided t tests reject both "gap ≤ −margin" and "gap ≥ +margin" at
  alpha = 1 − confidence; the same as: the 1 − 2·alpha interval lies inside ±margin
  (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15; Lakens 2017, Soc. Psychol. Personal.
  Sci. 8). A gap that is real but smaller than the margin is on par.
- **worse** / **better**: not on par, and the whole confidence interval lies above / below 0.
- **undecided**: neither. More seeds decide it; the text says about how many.
- **diverged**: the loss of a seed was lost where the baseline's was not.
- **failed**: no pair of finished runs, and a run of the arm failed.
- **not run**: no pair of finished runs yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from zpp_lab.config import ArmConfig, StudyConfig
from zpp_lab.study import stats
from zpp_lab.study.runs import Run
from zpp_lab.study.stats import Gap

VERDICTS = (
    "baseline",
    "on par",
    "better",
    "undecided",
    "worse",
    "diverged",
    "failed",
    "not run",
)


@dataclass(frozen=True)
class ArmResult:
    """One arm: its runs by seed, its gaps by seed (nats), and what they say."""

    arm: ArmConfig
    runs: Mapping[int, Run]
    verdict: str
    note: str = ""
    gaps: Mapping[int, float] = field(default_factory=dict)
    gap: Gap | None = None
    heldout_loss: float | None = None  # mean of the finished runs, nats per token
    bytes_total: float | None = None  # bytes a step as a fraction of the baseline's
    bytes_inter: float | None = None  # the same, between nodes only

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def text(self) -> str:
        return f"{self.verdict} ({self.note})" if self.note else self.verdict

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs.values() if run.outcome == "finished"]


@dataclass(frozen=True)
class StudyResult:
    """All arms in the study's order, with the margin in nats (None without a baseline)."""

    study: StudyConfig
    arms: Sequence[ArmResult]
    margin: float | None
    notes: Sequence[str] = ()

    @property
    def baseline(self) -> ArmResult:
        return next(a for a in self.arms if a.name == self.study.baseline)

    @property
    def runs(self) -> list[Run]:
        """Every run, by arm in the study's order, then by seed."""
        return [run for arm in self.arms for _, run in sorted(arm.runs.items())]


def judge(gap: Gap, margin: float, confidence: float = 0.95) -> tuple[str, str]:
    """(verdict, note) of one arm; see the module's docstring for the rule."""
    if gap.interval is None or gap.p_equal is None:
        return "undecided", "needs at least 2 seeds"
    if gap.p_equal < 1 - confidence:
        return "on par", ""
    if gap.interval[0] > 0:
        return "worse", ""
    if gap.interval[1] < 0:
        return "better", ""
    needed = stats.seeds_to_decide(gap, margin, confidence)
    return "undecided", f"needs about {needed or f'more than {stats.MAX_SEEDS}'} seeds"


def judge_study(study: StudyConfig, runs: Sequence[Run], notes: Sequence[str] = ()) -> StudyResult:
    """Pair every arm's finished runs with the baseline's of the same seed, and judge."""
    by_arm: dict[str, dict[int, Run]] = {arm.name: {} for arm in study.arms}
    unknown: set[str] = set()
    for run in runs:
        if run.arm not in by_arm:
            unknown.add(run.arm)
        elif run.seed in study.seeds:
            by_arm[run.arm].setdefault(run.seed, run)
    base = by_arm[study.baseline]
    losses = [run.heldout_loss for run in base.values() if run.heldout_loss is not None]
    margin = study.margin * fmean(losses) if losses else None
    notes = [*notes, *(f"Arm {name} is no arm of the study; left out." for name in sorted(unknown))]
    arms = [_judge_arm(study, arm, by_arm[arm.name], base, margin) for arm in study.arms]
    for result in arms:
        notes += _seed_notes(study, result)
    return StudyResult(study, arms, margin, notes)


def _judge_arm(
    study: StudyConfig,
    arm: ArmConfig,
    runs: Mapping[int, Run],
    base: Mapping[int, Run],
    margin: float | None,
) -> ArmResult:
    gaps = _paired_gaps(runs, base)
    finished = [run.heldout_loss for run in runs.values() if run.heldout_loss is not None]
    gap = (
        stats.summarize(list(gaps.values()), margin, study.confidence) if gaps and margin else None
    )
    verdict, note = _verdict(study, arm, runs, base, gap, margin)
    return ArmResult(
        arm,
        runs,
        verdict,
        note,
        gaps,
        gap,
        fmean(finished) if finished else None,
        _fraction(runs, base, None),
        _fraction(runs, base, "inter"),
    )


def _verdict(
    study: StudyConfig,
    arm: ArmConfig,
    runs: Mapping[int, Run],
    base: Mapping[int, Run],
    gap: Gap | None,
    margin: float | None,
) -> tuple[str, str]:
    outcomes = {seed: run.outcome for seed, run in runs.items()}
    diverged = [
        seed
        for seed, outcome in outcomes.items()
        if outcome == "diverged" and (seed not in base or base[seed].outcome != "diverged")
    ]
    failed = sorted({o for o in outcomes.values() if o not in ("finished", "unfinished")})
    if arm.name == study.baseline:
        if margin is not None:
            return "baseline", ""
    elif diverged:
        return "diverged", f"{len(diverged)} of {len(study.seeds)} seeds"
    elif gap is not None and margin is not None:
        return judge(gap, margin, study.confidence)
    if failed:
        return "failed", ", ".join(o.replace("_", " ") for o in failed)
    if "finished" in outcomes.values():
        return "not run", "no baseline run to compare with"
    return "not run", ""


def _paired_gaps(runs: Mapping[int, Run], base: Mapping[int, Run]) -> dict[int, float]:
    gaps = {}
    for seed in sorted(runs.keys() & base.keys()):
        mine, theirs = runs[seed].heldout_loss, base[seed].heldout_loss
        if mine is not None and theirs is not None:
            gaps[seed] = mine - theirs
    return gaps


def _fraction(runs: Mapping[int, Run], base: Mapping[int, Run], hop: str | None) -> float | None:
    """Mean bytes a step over the baseline's; None when either is unknown or nothing is sent."""
    mine, theirs = (
        [b for run in side.values() if (b := run.bytes_per_step(hop)) is not None]
        for side in (runs, base)
    )
    if not mine or not theirs or fmean(theirs) == 0:
        return None
    return fmean(mine) / fmean(theirs)


def _seed_notes(study: StudyConfig, result: ArmResult) -> list[str]:
    """Sentences on the seeds that could not be used; seeds of one fate share one."""
    words = {"unfinished": "has not finished", "out_of_memory": "ran out of memory"}
    fates: dict[str, list[int]] = {}
    for seed in study.seeds:
        run = result.runs.get(seed)
        outcome = run.outcome if run else "unfinished"
        if outcome != "finished":
            error = _first_line(run.failure["error"]) if run and run.failure else ""
            fate = words.get(outcome, outcome) + (f" ({error})" if error else "")
            fates.setdefault(fate, []).append(seed)
    return [
        f"{result.name}: {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{', '.join(map(str, seeds))} {_plural(fate, len(seeds))}."
        for fate, seeds in fates.items()
    ]


def _plural(fate: str, count: int) -> str:
    return fate if count == 1 else fate.replace("has not", "have not")


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else ""
