"""Rewards by name. Other packages add theirs through the entry point group `zpp_lab.rewards`.

An entry point is a function with TRL's signature:

    def reward(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]

`columns` has the fields of the prompts' records, such as `completion`, the answer, and the tokens
`prompt_ids` and `completion_ids`. None is for a completion that the reward does not judge, and adds
nothing. A reward is called for a whole rollout at once, on rank 0, in its main thread; one that
takes longer than `rl.timeout` seconds scores 0.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import FrameType
from typing import Any

import numpy as np

Reward = Callable[..., Sequence[float | None]]


class RewardError(RuntimeError):
    """A reward raised, or returned something else than a number a completion."""


def addition(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Score 1 where the completion is the sum of the numbers that the prompt asks to add."""
    pairs = zip(prompts, completions, strict=True)
    return [float(re.fullmatch(rf"\s*0*{_total(p)}\s*", text) is not None) for p, text in pairs]


def sums(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Score 1 where the last number of the completion is the sum of the prompt's."""
    last = [re.findall(r"\d+", text)[-1:] for text in completions]
    return [float(n == [str(_total(p))]) for p, n in zip(prompts, last, strict=True)]


def exact(
    prompts: list[str], completions: list[str], completion: list[str], **columns: Any
) -> list[float]:
    """Score 1 where the completion is the record's, apart from white space around it."""
    pairs = zip(completions, completion, strict=True)
    return [float(text.strip() == answer.strip()) for text, answer in pairs]


def form(
    prompts: list[str], completions: list[str], completion: list[str], **columns: Any
) -> list[float]:
    """Score 1 where the completion has the form of the record's: the same characters, but for which
    digits and letters, and how many in a row."""
    pairs = zip(completions, completion, strict=True)
    return [float(_form(text) == _form(answer)) for text, answer in pairs]


def _total(prompt: str) -> int:
    """Return the sum of the last numbers that + signs join: the prompt may have examples before."""
    found = re.findall(r"\d+(?:\s*\+\s*\d+)*", prompt)
    return sum(map(int, re.findall(r"\d+", found[-1]))) if found else 0


def _form(text: str) -> str:
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", text.strip()))


LEARNED = "learned"  # by a model (`learned.py`)
_SHIPPED: dict[str, Reward] = {"addition": addition, "exact": exact, "format": form, "sums": sums}


@cache
def _entry_points() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group="zpp_lab.rewards")}


def reward(name: str) -> Reward:
    """Return the reward of this name; ValueError for an unknown one, or one that does not load."""
    points = _entry_points()
    if name in _SHIPPED:
        return _SHIPPED[name]
    if name not in points:
        valid = ", ".join(sorted({*_SHIPPED, LEARNED, *points}))
        raise ValueError(f"rl.rewards: unknown reward {name!r}; valid names: {valid}")
    try:
        found: Reward = points[name].load()
    except Exception as error:
        raise ValueError(
            f"rl.rewards: cannot load {points[name].value!r} of {name!r} ({error}); fix or "
            "reinstall its package"
        ) from error
    return found


@dataclass(frozen=True)
class Scores:
    """values: fp64 [rewards, completions], before weights; late: rewards that took too long."""

    values: np.ndarray
    late: tuple[str, ...] = ()

    def weighted(self, weights: Sequence[float]) -> np.ndarray:
        """Return each completion's reward, fp64 [completions]; added up in the rewards' order."""
        total = np.zeros(self.values.shape[1])
        for weight, own in zip(weights, self.values, strict=True):
            total = total + weight * own
        return total


def score(
    rewards: Mapping[str, Reward],
    prompts: list[str],
    completions: list[str],
    columns: Mapping[str, list[Any]],
    seconds: float,
) -> Scores:
    """Call each reward, for at most `seconds`; RewardError for one that fails."""
    rows, late = [], []
    for name, function in rewards.items():
        try:
            with _limit(seconds):
                found = list(function(prompts=prompts, completions=completions, **columns))
            rows.append(_checked(name, found, len(completions)))
        except _TooLate:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # it may have come while the limit ended
            late.append(name)
            rows.append([0.0] * len(completions))
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"the reward {name!r} failed: {type(error).__name__}: {error}; mend it, and the "
                "same command resumes"
            ) from error
    return Scores(np.array(rows), tuple(late))


def _checked(name: str, found: list[Any], count: int) -> list[float]:
    if len(found) != count:
        raise ValueError(f"it returned {len(found)} values for {count} completions")
    values = [0.0 if value is None else float(value) for value in found]
    if bad := [value for value in values if not math.isfinite(value)]:
        raise ValueError(f"it returned {bad[0]}, which is not finite")
    return values


class _TooLate(BaseException):
    """No Exception, so that a reward that catches those ends as well."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise _TooLate in the main thread after `seconds`, and again every second from then on: a
    reward may have caught it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLate

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
