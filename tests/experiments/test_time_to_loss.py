"""Time to the same loss: its arithmetic, what it refuses, and that pages say what runs gave."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.experiments.scripts import loaded

script = loaded("experiments/reference/time_to_loss.py")
Curve, to_make_up = script.Curve, script.to_make_up
TRUE = Curve(floor=1.2, scale=900.0, power=0.4)
BUDGETS = (12_000_000, 49_000_000, 197_000_000)
AT = BUDGETS[1]


def budgets(curve: script.Curve, noise: float = 0.0, seed: int = 0) -> dict[int, list[float]]:
    draw = np.random.default_rng(seed)
    return {t: list(curve.loss(t) + noise * draw.standard_normal(4)) for t in BUDGETS}


def test_three_budgets_find_the_curve_that_made_them() -> None:
    found = Curve.through({t: TRUE.loss(t) for t in BUDGETS})
    assert found.floor == pytest.approx(TRUE.floor, abs=1e-4)
    assert found.power == pytest.approx(TRUE.power, rel=1e-4)
    assert found.loss(1e9) == pytest.approx(TRUE.loss(1e9), abs=1e-4)
    assert found.tokens(found.loss(7e7)) == pytest.approx(7e7)


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ({AT: 1.9}, "needs two"),
        ({BUDGETS[0]: 1.9, AT: 1.9}, "do not fall"),
        ({BUDGETS[0]: 1.9, AT: 2.0, BUDGETS[2]: 1.8}, "do not fall"),
        ({BUDGETS[0]: 3.0, AT: 2.9, BUDGETS[2]: 1.0}, "leave a budget out"),
        ({BUDGETS[0]: 3.0, AT: 2.0, BUDGETS[2]: 1.99999}, "leave a budget out"),
    ],
)
def test_losses_that_no_curve_has_are_refused(losses: dict[int, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Curve.through(losses)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 draws of four seeds at three budgets, at least 95 % less what chance takes."""
    gap, inside = 0.03, 0
    truth = TRUE.tokens(TRUE.loss(AT) - gap) / AT
    for seed in range(200):
        draw = np.random.default_rng([1, seed])
        found = to_make_up(
            budgets(TRUE, 0.004, seed), list(gap + 0.01 * draw.standard_normal(4)), AT
        )
        inside += found.low <= truth <= found.high
    assert inside / 200 > script.CONFIDENCE - 0.03


def test_a_gap_that_no_tokens_make_up() -> None:
    losses = budgets(TRUE, 0.001)
    below = TRUE.loss(AT) - TRUE.floor
    never = to_make_up(losses, [below + 0.4, below + 0.5], AT)
    assert never.value == never.high == math.inf
    perhaps = to_make_up(losses, [below - 0.25, below + 0.05] * 2, AT)
    assert 1 < perhaps.low < perhaps.value < perhaps.high == math.inf
    unlikely = to_make_up(losses, [below + 0.3, below - 0.2] * 2, AT)
    assert 0 < unlikely.low < unlikely.value == math.inf


@pytest.mark.slow
def test_the_pages_say_what_the_kept_runs_give() -> None:
    speeds, results = script.sources()
    found = script.rows_of(speeds, results)
    for page in script.PAGES:
        assert script.table(found, len(results)) in page.read_text(), f"run {script.__file__}"
    assert (script.HERE / "time_to_loss.csv").read_text() == script.as_csv(found)
