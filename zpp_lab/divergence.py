"""When a loss that is still finite counts as lost.

A run that has left the loss it had reached for good would otherwise go on for hours. The rule
looks at the losses alone, so that a run which was killed and resumed ends at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zpp_lab.config import TrainConfig

_WINDOW = 20  # steps that the smoothed loss is the mean of


class DivergedError(ArithmeticError):
    """The loss stayed far above the best one for long."""


class DivergenceRule:
    """Ends a run when `train.diverge_steps` losses in a row lie more than `train.diverge_above`
    nats above the lowest mean of any 20 steps before. `diverge_above=0` never does."""

    def __init__(self, train: TrainConfig, losses: Iterable[float] = ()) -> None:
        """losses: those of the steps before this start of the run, in nats per token."""
        self._above, self._steps = train.diverge_above, train.diverge_steps
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._best = float("inf")
        self._lost = 0  # steps in a row
        for loss in losses:
            self._add(loss)

    def look(self, step: int, loss: float) -> None:
        """Take the loss of `step`; DivergedError when the rule is met."""
        self._add(loss)
        if self._above and self._lost >= self._steps:
            raise DivergedError(
                f"step {step}: the loss is {loss:.3f} and was more than {self._above:g} nats above "
                f"its best mean of {_WINDOW} steps ({self._best:.3f}) for {self._lost} steps "
                "(train.diverge_above, train.diverge_steps)"
            )

    def _add(self, loss: float) -> None:
        self._lost = self._lost + 1 if loss > self._best + self._above else 0
        self._recent.append(loss)
        if len(self._recent) == _WINDOW:
            self._best = min(self._best, sum(self._recent) / _WINDOW)
