"""Time to the same loss: its arithmetic, what it refuses, and that pages say what runs gave."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from tests.experiments.scripts import loaded
from tests.study.fake_runs import fake_study, write_study_runs
from tests.study.report.fake_speeds import ARMS, Arm, rows, write_speeds
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import StudyResult, read_result
from zpp_lab.study.report.speed.results import read_speeds

script = loaded("experiments/reference/time_to_loss.py")
Curve, to_make_up = script.Curve, script.to_make_up
TRUE = Curve(floor=1.2, scale=900.0, power=0.4)
BUDGETS = (12_000_000, 49_000_000, 197_000_000)
AT = BUDGETS[1]
TWO = {BUDGETS[0]: [3.2, 3.3, 3.25], AT: [1.92, 1.93, 1.91]}
GAPS = [0.004, 0.009, 0.006, 0.005]


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


def test_the_interval_has_the_gaps_scatter_and_that_of_every_budget() -> None:
    own, exact = to_make_up(TWO, GAPS, AT), {t: [fmean(losses)] * 3 for t, losses in TWO.items()}
    of_gap = to_make_up(exact, GAPS, AT)
    for side, end in zip(("low", "high"), t_interval(GAPS, script.CONFIDENCE), strict=True):
        of_curve = to_make_up(TWO, [end, end], AT)
        parts = [math.log(getattr(one, side) / one.value) for one in (of_gap, of_curve)]
        assert all((part > 0) == (side == "high") for part in parts)
        whole = math.log(getattr(own, side) / own.value)
        assert abs(whole) == pytest.approx(math.hypot(*parts), rel=1e-6)


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


# ---------------------------------------------------------------------- rows of a table of speeds


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[StudyResult]:
    """An invented study and its baseline on a quarter of the tokens, 0.4 nats higher."""
    whole, quarter = (tmp_path_factory.mktemp(name) for name in ("whole", "quarter"))
    write_study_runs(whole, fake_study())
    alone = replace(fake_study(), arms=fake_study().arms[:1])
    write_study_runs(quarter, alone, steps=75)
    for file in quarter.glob("*/*/summary.json"):
        summary = json.loads(file.read_text())
        summary["heldout_loss"] += 0.4
        file.write_text(json.dumps(summary))
    return [read_result(whole, fake_study()), read_result(quarter, alone)]


def measured(folder: Path, arms: tuple[Arm, ...]) -> list[script.Measured]:
    return read_speeds(write_speeds(folder, rows(arms)))


W4 = {"recipe.name": "mine", "recipe.weights.bits": 4}
MORE = (
    *ARMS[:2],
    Arm("mine", 1.8, 0.15, config=W4),
    Arm("kept", 1.8, 0.15, config=W4 | {"recipe.secondary": True}),
    Arm("w3", 1.4, 0.15, config={"recipe.name": "w3", "recipe.weights.bits": 3}),
    Arm("ds_w4", 1.8, 0.15, "deepspeed", W4),
)


def test_an_arm_has_the_gap_of_the_studys_arm_that_trains_alike(
    tmp_path: Path, results: list[StudyResult]
) -> None:
    found = {row.arm: row for row in script.rows_of(measured(tmp_path, MORE), results)}
    assert list(found) == ["fsdp2+node", "fsdp2", "mine", "kept"]  # w3 has no gap, DeepSpeed none
    w4 = next(arm for arm in results[0].arms if arm.name == "w4")
    for name in ("mine", "kept"):
        assert found[name].alike == "w4"
        assert list(found[name].gaps) == list(w4.gaps.values())
        assert found[name].tokens.low > 1
    assert not found["fsdp2"].gaps


def test_time_is_tokens_times_seconds_over_the_fastest_plain_arm(
    tmp_path: Path, results: list[StudyResult]
) -> None:
    speeds = measured(tmp_path, MORE)
    seconds = {(m.arm, m.place): m.step_s for m in speeds}
    found = {row.arm: row for row in script.rows_of(speeds, results)}
    node, plain, mine = (found[name] for name in ("fsdp2+node", "fsdp2", "mine"))
    assert node.times["25 Gb/s"] == plain.times["inside a host"] == script.ONE
    assert plain.times["25 Gb/s"].value == pytest.approx(5.4 / 3.6)  # no gap: the speeds alone
    for place, time in mine.times.items():
        base = "fsdp2" if place in ("inside a host", "no limit", "400 Gb/s") else "fsdp2+node"
        share = seconds["mine", place] / seconds[base, place]
        assert time.value == pytest.approx(mine.tokens.value * share)
        assert time.low == pytest.approx(mine.tokens.low * share * 0.98 / 1.02)
        assert time.high == pytest.approx(mine.tokens.high * share * 1.02 / 0.98)
    lead = math.log(seconds["fsdp2+node", "50 Gb/s"] / seconds["mine", "50 Gb/s"])
    assert mine.spare == pytest.approx(lead / math.log(mine.tokens.high))
    assert plain.spare == math.inf


@pytest.mark.slow
def test_the_pages_say_what_the_kept_runs_give() -> None:
    speeds, results = script.sources()
    found = script.rows_of(speeds, results)
    for page in script.PAGES:
        assert script.table(found, len(results)) in page.read_text(), f"run {script.__file__}"
    assert (script.HERE / "time_to_loss.csv").read_text() == script.as_csv(found)
