"""How sure a study is of its gaps: p-values, intervals over documents, the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zpp_lab.study.judge.documents import count
from zpp_lab.study.judge.families import PValues, look_sizes, nominal_level
from zpp_lab.study.judge.noise import NoiseFloor, noise_floors, one_seed
from zpp_lab.study.judge.stats import Gap, t_interval
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.words import NOTHING, p_value, signed

COLUMNS = (
    "Arm",
    *("p (differs)", "p (differs), corrected", "p (inside)", "p (inside), corrected"),
    *("p (beyond)", "p (beyond), corrected", "Looks"),
    *("Gap, as decided", "Level", "Gap, alone", "Gap, other documents", "Gap, other seeds"),
)


@dataclass(frozen=True)
class Certainty:
    """floors: one a baseline with two seeds or more."""

    result: StudyResult
    floors: Sequence[NoiseFloor]

    def rows(self) -> list[list[str]]:
        """Return COLUMNS as text, one row an arm, without baselines and arms without values."""
        arms = [arm for arm in self.result.ranked if arm.verdict != "baseline"]
        rows = [[arm.name, *_p_values(arm.tests), *self._intervals(arm)] for arm in arms]
        looks = COLUMNS.index("Looks")
        return [row for row in rows if any(c != NOTHING for c in row[1:looks] + row[looks + 1 :])]

    def lines(self) -> list[str]:
        """Return sentences on the intervals and on the noise floor."""
        noise = [line for floor in self.floors for line in floor.lines]
        return [*filter(None, [self._on_documents(), self._on_deciding()]), *noise]

    def _on_deciding(self) -> str:
        """What the first intervals are; "" where nothing is tested."""
        if not any(arm.gap and arm.gap.deciding for arm in self.result.every):
            return ""
        return (
            "As decided: the interval of the verdict, at the corrected level of its test. That "
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
    """Return what is known of the intervals, the p-values and the noise."""
    return Certainty(result, noise_floors(result))


def _p_values(t: PValues) -> list[str]:
    found = (t.differs, t.differs_corrected, t.equal, t.equal_corrected, t.beyond)
    return [*map(p_value, (*found, t.beyond_corrected)), str(t.looks)]


def _range(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return NOTHING
    return f"{signed(interval[0])} to {signed(interval[1])}"
