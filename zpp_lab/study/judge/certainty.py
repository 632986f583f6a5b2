"""How sure a study is of its gaps: p-values, intervals over documents, the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zpp_lab.study.judge.documents import count
from zpp_lab.study.judge.families import look_sizes, nominal_level
from zpp_lab.study.judge.noise import (
    NAMED,
    TIMES,
    ApartStep,
    NoiseFloor,
    Quiet,
    apart_steps,
    noise_floors,
    one_seed,
    quiet_parts,
)
from zpp_lab.study.judge.stats import Gap, t_interval
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.words import NOTHING, P_VALUE_COLUMNS, p_value_rows, signed

COLUMNS = (
    *P_VALUE_COLUMNS,
    "Gap, as decided",
    "Level",
    "Gap, alone",
    "Gap, other documents",
    "Gap, other seeds",
    "Gap, quiet part",
)


@dataclass(frozen=True)
class Certainty:
    """floors: one a baseline with two seeds or more;
    quiet: the steps before noise takes over, one a baseline that has such; apart: steps in which
    one run's gradient jumps alone."""

    result: StudyResult
    floors: Sequence[NoiseFloor]
    quiet: Sequence[Quiet] = ()
    apart: Sequence[ApartStep] = ()

    def rows(self) -> list[list[str]]:
        """COLUMNS as text, one row an arm but baselines and those of which nothing is known."""
        quiet = {
            arm: f"{signed(mean)}, at most {largest:.4f}"
            for part in self.quiet
            for arm, (mean, largest) in part.arms.items()
        }
        by_name = {arm.name: arm for arm in self.result.every}
        rows = [
            [*row, *self._intervals(by_name[row[0]]), quiet.get(row[0], NOTHING)]
            for row in p_value_rows(self.result)
        ]
        looks = COLUMNS.index("Looks")
        return [row for row in rows if any(c != NOTHING for c in row[1:looks] + row[looks + 1 :])]

    def lines(self) -> list[str]:
        """Sentences on the intervals, on the noise floor, on the quiet part, on steps apart."""
        noise = [line for floor in self.floors for line in floor.lines]
        noise += [
            f"Quiet part of {part.baseline}: steps 1 to {part.end}, in which the training loss of "
            f"{' and '.join(part.controls)} stays within {part.noise:.1e} nats of it. The column "
            "has the mean and the largest absolute gap over these steps and all seeds."
            for part in self.quiet
        ]
        if self.apart:
            told = ", ".join(one.text for one in self.apart[:NAMED])
            noise.append(
                f"Deviating steps ({len(self.apart)}): the gradient norm was at least {TIMES:g} "
                f"times that of the seed's other runs: {told}"
                f"{', …' if len(self.apart) > NAMED else ''}. "
                "`zpp-lab batch RUN STEP` shows the text."
            )
        return [*filter(None, [self._on_documents(), self._on_deciding()]), *noise]

    def _on_deciding(self) -> str:
        """What the first intervals are; "" where nothing is tested."""
        if not any(arm.gap and arm.gap.deciding for arm in self.result.every):
            return ""
        return (
            "As decided: the interval beside the verdict, at the corrected level of its test. That "
            "is the test beyond the margin for better and worse, the one-sided test inside it for "
            "on par, and the test of 0 for the others. Alone: the "
            f"{self.result.study.confidence:.0%} interval without a correction for other arms."
        )

    def _on_documents(self) -> str:
        """What the two intervals are; "" where no run tells its losses by document."""
        sets = {arm.documents.hash: arm.documents for arm in self.result.arms if arm.documents}
        if not sets:
            return ""
        tokens = [one.tokens for one in sets.values()]
        counts = [f"{len(t)} (equivalent to {count(t):.0f} of equal length)" for t in tokens]
        text = (
            f"Other documents: {self.result.study.confidence:.0%} intervals of the gap for the "
            f"same runs and other held-out documents in place of these {' or '.join(counts)}."
        )
        if one_seed(self.result):
            return (
                f"{text} They show how much the choice of text matters, not how far another run "
                "would move the gap. No arm is shown to differ, even where 0 lies outside."
            )
        return f"{text} Other seeds: intervals for the same documents and other seeds."

    def _intervals(self, arm: ArmResult) -> tuple[str, ...]:
        study = self.result.study
        level = nominal_level(1 - study.confidence, look_sizes(study), 2)
        gaps, texts = list(arm.gaps.values()), arm.documents
        gap = arm.gap or Gap(0, 0.0)
        return (
            _range(gap.deciding),
            NOTHING if gap.level is None else f"{1 - gap.level:.2%}",
            _range(gap.interval),
            _range(texts.interval(study.confidence) if texts else None),
            _range(t_interval(gaps, 1 - level) if texts and len(gaps) > 1 else None),
        )


def certainty(result: StudyResult) -> Certainty:
    """Reads metrics.jsonl of every run."""
    floors, quiet = noise_floors(result), quiet_parts(result)
    return Certainty(result, floors, quiet, apart_steps(result))


def _range(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return NOTHING
    return f"{signed(interval[0])} to {signed(interval[1])}"
