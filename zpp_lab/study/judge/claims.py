"""What can be claimed of an arm's gap: names of verdicts, the rule behind them, and controls.

Three claims are tested, each at level alpha: the gap **differs** from 0, it is **inside** the
margin, it lies **beyond** the margin. Together they make the verdict:

| claims | gap above 0 | gap below 0 |
|---|---|---|
| beyond | worse | better |
| inside, differs | on par (≠ 0) | on par (≠ 0) |
| inside | on par | on par |
| differs | above zero, size open | below zero, size open |
| none | undecided | undecided |
"""

from __future__ import annotations

from dataclasses import dataclass

from zpp_lab.runs.reader import NO_ANSWER
from zpp_lab.study.judge.families import PValues
from zpp_lab.study.judge.stats import Gap

ON_PAR = "on par"
MARK = "(≠ 0)"
ON_PAR_MARKED = f"{ON_PAR} {MARK}"
WORSE = "worse"
BETTER = "better"
ABOVE_OPEN = "above zero, size open"
BELOW_OPEN = "below zero, size open"
UNDECIDED = "undecided"

VERDICTS = (ON_PAR, ON_PAR_MARKED, BETTER, BELOW_OPEN, ABOVE_OPEN, WORSE, UNDECIDED)
INSIDE = (ON_PAR, ON_PAR_MARKED)
GOOD = (*INSIDE, BETTER, BELOW_OPEN)  # shown not to be above 0 by more than the margin
OPEN = (UNDECIDED, ABOVE_OPEN, BELOW_OPEN)  # more seeds would say more

EXPECTED = {"negative_control": (WORSE,), "order_control": INSIDE}  # of controls, known beforehand
_MUST = {"negative_control": WORSE, "order_control": "inside the margin"}


def verdict_of(mean: float, tests: PValues, confidence: float = 0.95) -> str:
    """Return one of VERDICTS, of a mean gap in nats; the module's docstring has the rule."""
    alpha = 1 - confidence
    differs, inside, beyond = (
        p is not None and p < alpha
        for p in (tests.differs_corrected, tests.equal_corrected, tests.beyond_corrected)
    )
    above = mean > 0
    if beyond:
        return WORSE if above else BETTER
    if inside:
        return ON_PAR_MARKED if differs else ON_PAR
    if differs:
        return ABOVE_OPEN if above else BELOW_OPEN
    return UNDECIDED


def deciding_level(verdict: str, gap: Gap, tests: PValues) -> float | None:
    """Return the level of the interval that shows what a verdict claims: that of the claim's own
    test after all corrections, which for "inside" is twice as large, as its test has one side.

    Where the interval would also show what is not claimed, as tests differ in their levels, another
    test's takes its place, or the one at which it just reaches 0 or the margin. Where none shows
    just what is claimed (one test has one side, others two) the claim's own stays. None without
    tests.
    """
    if not tests.levels or gap.p_differs is None or gap.p_equal is None or gap.p_beyond is None:
        return None
    differs, inside, beyond = tests.levels[0], 2 * tests.levels[1], tests.levels[2]
    claimed = [
        (gap.p_differs, verdict not in (ON_PAR, UNDECIDED)),
        (2 * gap.p_equal, verdict in INSIDE),
        (gap.p_beyond, verdict in (WORSE, BETTER)),
    ]
    first = beyond if verdict in (WORSE, BETTER) else inside if verdict in INSIDE else differs
    reached = 0.999 * min((p for p, made in claimed if not made), default=1.0)
    for level in (first, differs, inside, beyond, reached):
        if all((p < level) == made for p, made in claimed):
            return min(level, 1.0)
    return first


@dataclass(frozen=True)
class Control:
    """An arm that tests the instrument. The verdict of negative and order controls is known
    beforehand: if it comes out otherwise, trust nothing else. A sham control's is not."""

    arm: str
    role: str
    verdict: str
    gap: float | None = None  # nats, where the arm has one seed, which no test can judge

    @property
    def unanswered(self) -> bool:
        """Whether no run of it can be judged yet."""
        return self.verdict in NO_ANSWER

    @property
    def ok(self) -> bool:
        """A negative control that diverged is worse than worse."""
        if self.role not in EXPECTED:
            return True
        return self.verdict in EXPECTED[self.role] or (
            self.role == "negative_control" and self.verdict == "diverged"
        )

    @property
    def waiting(self) -> bool:
        """Whether more seeds may still bring out what it must be."""
        if self.role not in EXPECTED:
            return False
        halfway = self.role == "negative_control" and self.verdict == ABOVE_OPEN
        return self.unanswered or self.verdict == UNDECIDED or halfway

    @property
    def wrong(self) -> bool:
        return not self.ok and not self.waiting

    @property
    def text(self) -> str:
        name = f"{self.role.replace('_', ' ').capitalize()} {self.arm}"
        if self.gap is not None:
            gap = f"{self.gap:+.4f}".replace("-", "−")
            return f"{name}: not tested with one seed (gap {gap} nats)."
        if self.role not in EXPECTED:
            return (
                f"{name}: {self.verdict}. It adds noise of a codec's size; nothing is known before."
            )
        must = f"must be {_MUST[self.role]}"
        if self.waiting:
            return f"{name}: {self.verdict}, so far without an answer; it {must}."
        return f"{name}: {self.verdict}, {'as it must be' if self.ok else f'but {must}'}."
