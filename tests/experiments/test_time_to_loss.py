"""Time to the same loss: its arithmetic, what it refuses, and that pages say what runs gave."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.experiments.scripts import loaded
from tests.study.fake_runs import fake_study, write_study_runs
from tests.study.report.fake_speeds import ARMS, Arm, rows, write_speeds
from zpp_lab.study.judge.verdict import StudyResult, read_result
from zpp_lab.study.speed.results import read_speeds

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
    found = {
        row.arm: row
        for row in script.rows_of(read_speeds(write_speeds(tmp_path, rows(MORE))), results)
    }
    assert list(found) == ["fsdp2+node", "fsdp2", "mine", "kept"]  # w3 has no gap, DeepSpeed none
    w4 = next(arm for arm in results[0].arms if arm.name == "w4")
    for name in ("mine", "kept"):
        assert found[name].alike == "w4"
        assert list(found[name].gaps) == list(w4.gaps.values())
        assert found[name].tokens.low > 1
    assert not found["fsdp2"].gaps


def test_a_raw_twin_stands_beside_its_arm(tmp_path: Path, results: list[StudyResult]) -> None:
    """Without a gap of its own; the arm's time is given over plain training and over the twin."""
    raw = {"recipe.name": "raw", "recipe.secondary": True}
    arms = (*ARMS[:2], Arm("raw", 2.4, 0.15, config=raw), replace(MORE[3], twin="raw"))
    speeds = read_speeds(write_speeds(tmp_path, rows(arms)))
    found = {row.arm: row for row in script.rows_of(speeds, results)}
    kept, twin = found["kept"], found["raw"]
    assert (twin.alike, list(twin.gaps), twin.tokens) == ("", [], script.ONE)
    assert kept.over_twin["12 Gb/s"].value == pytest.approx(kept.tokens.value * 1.8 / 2.4, rel=1e-4)
    assert not twin.over_twin
    header, *lines = script.as_csv(list(found.values())).splitlines()
    assert header.endswith(",over_twin")
    assert all((line[-1] != ",") == line.startswith("kept") for line in lines)


def test_a_study_beside_gives_gaps_of_the_arms_that_the_first_lacks(
    tmp_path: Path, results: list[StudyResult]
) -> None:
    speeds = read_speeds(write_speeds(tmp_path, rows(MORE)))
    first, quarter = results
    without = replace(first, arms=[arm for arm in first.arms if arm.name != "w4"])
    other = replace(first, arms=[replace(arm, gaps={1: 9.0, 2: 9.1}) for arm in first.arms])
    found = script.rows_of(speeds, results)
    assert "mine" not in {row.arm for row in script.rows_of(speeds, [without, quarter])}
    assert script.rows_of(speeds, [without, quarter], [first]) == found
    assert script.rows_of(speeds, results, [other]) == found  # the first study's own
    with pytest.raises(ValueError, match="another baseline"):
        script.rows_of(speeds, results, [quarter])


@pytest.mark.slow
def test_the_pages_say_what_the_kept_runs_give() -> None:
    speeds, results, beside = script.sources()
    found = script.rows_of(speeds, results, beside)
    for page, made in script.pages(found, len(results)).items():
        assert made in page.read_text(), f"run {script.__file__}"
    assert (script.HERE / "time_to_loss.csv").read_text() == script.as_csv(found)
