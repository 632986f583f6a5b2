"""Controls: arms whose verdict is known before the study runs."""

from __future__ import annotations

from dataclasses import dataclass

from zpp_lab.study.states import NO_ANSWER

EXPECTED = {"negative_control": "worse", "order_control": "on par"}
_WORDS = {"negative_control": "negative control", "order_control": "order control"}


@dataclass(frozen=True)
class Control:
    """An arm whose verdict is known beforehand: if it comes out otherwise, trust nothing else."""

    arm: str
    role: str
    expected: str
    verdict: str
    gap: float | None = None  # nats, where the arm has one seed, which no test can judge

    @property
    def untested(self) -> bool:
        return self.gap is not None

    @property
    def unanswered(self) -> bool:
        """Whether no run of it can be judged yet."""
        return self.verdict in NO_ANSWER

    @property
    def ok(self) -> bool:
        """A negative control that diverged is worse than worse."""
        return self.verdict == self.expected or (
            self.role == "negative_control" and self.verdict == "diverged"
        )

    @property
    def text(self) -> str:
        name = f"{_WORDS[self.role].capitalize()} {self.arm}"
        if self.gap is not None:
            gap = f"{self.gap:+.4f}".replace("-", "−")
            return f"{name}: one seed, which no test can judge (gap {gap} nats)."
        if self.unanswered:
            return f"{name}: {self.verdict}, so it has no answer yet; it must be {self.expected}."
        mark = "as it must be" if self.ok else f"but must be {self.expected}"
        return f"{name}: {self.verdict}, {mark}."
