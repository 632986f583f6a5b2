"""Time to the same loss: its arithmetic, what it refuses, and that pages say what runs gave."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.experiments.scripts import loaded
from tests.study.fake_runs import ARMS as FAKES
from tests.study.fake_runs import fake_study, write_study_runs
from tests.study.report.fake_speeds import TWINS, Arm, rows, write_speeds
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import StudyResult, read_result
from zpp_lab.study.speed.results import Measured, read_speeds

script = loaded("experiments/reference/time_to_loss.py")
Slopes = script.Slopes
FLOOR, SCALE, POWER = 1.2, 900.0, 0.4
BUDGETS = (12_000_000, 24_000_000, 48_000_000, 192_000_000)
AT = BUDGETS[2]


def true_loss(tokens: float) -> float:
    return FLOOR + SCALE * tokens**-POWER


LOSSES = {tokens: true_loss(tokens) for tokens in BUDGETS}


def test_the_middle_slope_is_that_of_the_power_law_that_made_the_anchors() -> None:
    found = Slopes.through(LOSSES)
    assert found.middle == pytest.approx(POWER * (true_loss(AT) - FLOOR))
    assert found.steepest == pytest.approx((LOSSES[BUDGETS[1]] - LOSSES[AT]) / math.log(2))
    assert found.shallowest == pytest.approx((LOSSES[AT] - LOSSES[BUDGETS[3]]) / math.log(4))
    assert found.steepest > found.middle > found.shallowest


def test_for_a_small_gap_the_extra_tokens_are_those_of_the_power_law() -> None:
    gap = 0.001
    tokens = (SCALE / (true_loss(AT) - gap - FLOOR)) ** (1 / POWER)
    found = Slopes.through(LOSSES).extra([gap, gap])
    assert found.value == pytest.approx(tokens / AT - 1, rel=0.01)
    assert found.low < tokens / AT - 1 < found.high


def test_anchors_behind_the_fourth_change_nothing() -> None:
    assert Slopes.through({**LOSSES, 4 * BUDGETS[3]: true_loss(4 * BUDGETS[3])}) == Slopes.through(
        LOSSES
    )


@pytest.mark.parametrize(
    "changed",
    [
        {BUDGETS[1]: LOSSES[BUDGETS[0]]},  # no fall
        {BUDGETS[3]: LOSSES[AT] + 0.01},
        {BUDGETS[1]: LOSSES[BUDGETS[0]] - 1e-3},  # falls faster later: not convex
        {BUDGETS[3]: 0.5},
    ],
)
def test_anchors_of_no_falling_convex_curve_are_refused(changed: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="anchors"):
        Slopes.through(LOSSES | changed)


def test_anchors_at_unequal_ratios_or_too_few_are_refused() -> None:
    three = {t: loss for t, loss in LOSSES.items() if t != BUDGETS[3]}
    unequal = {t: loss for t, loss in LOSSES.items() if t != AT} | {60_000_000: true_loss(6e7)}
    for losses in ({}, three, unequal):
        with pytest.raises(ValueError, match="anchors"):
            Slopes.through(losses)


@pytest.mark.parametrize("shift", [0.03, 0.0, -0.03])
def test_ends_are_those_of_the_gap_with_the_slope_that_takes_them_farthest(shift: float) -> None:
    """A gap below 0 goes farthest with the shallowest slope too."""
    slopes = Slopes(0.26, 0.30, 0.15)
    gaps = [shift + d for d in (-0.005, 0.0, 0.005)]
    low, high = t_interval(gaps, script.CONFIDENCE)
    found = slopes.extra(gaps)
    assert found.value == pytest.approx(math.expm1(shift / 0.26))
    assert found.low == pytest.approx(math.expm1(low / (0.30 if low > 0 else 0.15)))
    assert found.high == pytest.approx(math.expm1(high / (0.15 if high > 0 else 0.30)))


# ---------------------------------------------------------------------- rows of a table of speeds

SLOPES = Slopes(0.26, 0.30, 0.15)
W4 = {"recipe.name": "mine", "recipe.weights.bits": 4}
RAW = Arm("raw", 2.0, 0.15, config={"recipe.name": "raw", "recipe.secondary": True})
MINE = Arm("mine", 1.0, 0.15, config=W4 | {"recipe.secondary": True}, twin="raw")
TIMED = (*TWINS, RAW, MINE)
AT_12 = ("2 × 2", "12 Gb/s")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """An invented study with as many seeds as a row needs."""
    return judged(tmp_path_factory.mktemp("usual"), 300)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """The same in more steps, with larger gaps."""
    return judged(tmp_path_factory.mktemp("longer"), 600, more=0.05)


def judged(folder: Path, steps: int, more: float = 0.0) -> StudyResult:
    planned = fake_study(tuple(a for a in FAKES if a.name in ("zero3", "w4")), script.SEEDS)
    write_study_runs(folder, planned, steps=steps)
    for file in folder.glob("w4/*/summary.json"):
        summary = json.loads(file.read_text())
        summary["heldout_loss"] += more
        file.write_text(json.dumps(summary))
    return read_result(folder, planned)


def speeds(folder: Path, arms: Sequence[Arm] = TIMED) -> list[Measured]:
    return read_speeds(write_speeds(folder, rows(arms, {(2, 2): ("12", "25")})))


def found_of(
    folder: Path, studies: Sequence[StudyResult], arms: Sequence[Arm] = TIMED
) -> list[script.Row]:
    return script.rows_of(speeds(folder, arms), SLOPES, studies)


def w4_of(study: StudyResult) -> list[float]:
    return list(next(arm for arm in study.arms if arm.name == "w4").gaps.values())


def test_times_are_over_the_strongest_uncompressed_arm_twins_too(
    tmp_path: Path, study: StudyResult
) -> None:
    found = {row.arm: row for row in found_of(tmp_path, [study])}
    assert "diff" not in found  # no study has its gap
    assert found["raw"].times[AT_12] == script.ONE
    assert found["raw"].loss is None
    for name, gigabytes in (("hsdp", 3.5999), ("amsp_node", 2.4), ("fsdp2", 5.4)):
        assert found[name].times[AT_12].value == pytest.approx(gigabytes / 2.0, rel=1e-4)
    mine = found["mine"]
    assert mine.loss.arm == "w4"
    assert mine.loss.gaps == w4_of(study)
    assert mine.loss.more == SLOPES.extra(w4_of(study))
    expected = (1 + mine.loss.more.value) / 2.0
    assert mine.times[AT_12].value == pytest.approx(expected, rel=1e-4)
    assert mine.over_twin[AT_12] == mine.times[AT_12]
    assert mine.times[AT_12].low < expected < mine.times[AT_12].high


def test_a_row_for_each_number_of_steps(
    tmp_path: Path, study: StudyResult, longer: StudyResult
) -> None:
    found = [r for r in found_of(tmp_path, [study, longer]) if r.arm == "mine"]
    assert [row.loss.steps for row in found] == [300, 600]
    assert [row.loss.gaps for row in found] == [w4_of(study), w4_of(longer)]
    assert found[1].times[AT_12].value > found[0].times[AT_12].value


def test_the_first_study_of_as_many_steps_gives_the_gap(tmp_path: Path, study: StudyResult) -> None:
    other = replace(
        study,
        arms=[replace(a, gaps={seed: 9.0 + seed for seed in a.gaps}) for a in study.arms],
    )
    without = replace(study, arms=[arm for arm in study.arms if arm.name != "w4"])
    found = found_of(tmp_path / "a", [study])
    assert found_of(tmp_path / "b", [study, other]) == found
    assert found_of(tmp_path / "c", [without, study]) == found
    assert all(row.loss is None for row in found_of(tmp_path / "d", [without]))


def test_fewer_seeds_give_no_row(tmp_path: Path, study: StudyResult) -> None:
    few = [replace(a, gaps=dict(list(a.gaps.items())[1:])) for a in study.arms]
    assert all(row.loss is None for row in found_of(tmp_path, [replace(study, arms=few)]))


def test_a_study_with_another_baseline_is_refused(tmp_path: Path, study: StudyResult) -> None:
    summary = dict(study.baseline.finished[0].summary or {}, heldout_loss=9.0)
    run = replace(study.baseline.finished[0], summary=summary)
    arms = [replace(a, runs={1: run}) if a.name == study.baseline.name else a for a in study.arms]
    with pytest.raises(ValueError, match=study.study.name):
        found_of(tmp_path, [study, replace(study, arms=arms)])


@pytest.mark.parametrize(
    "arms",
    [
        [arm for arm in TIMED if arm.name != "hsdp"],
        [arm for arm in TIMED if arm.name != "raw"],
        [replace(arm, twin="") for arm in TIMED],
    ],
    ids=["no HSDP", "no raw twin", "no twin named"],
)
def test_a_call_without_hsdp_or_twins_is_refused(
    tmp_path: Path, study: StudyResult, arms: Sequence[Arm]
) -> None:
    with pytest.raises(ValueError, match=r"HSDP|twin"):
        found_of(tmp_path, [study], arms)


def test_an_arm_measured_twice_is_refused(tmp_path: Path, study: StudyResult) -> None:
    once = speeds(tmp_path)
    again = [replace(one, call="later") for one in once]
    with pytest.raises(ValueError, match="twice"):
        script.rows_of([*once, *again], SLOPES, [study])


def test_deepspeed_gets_no_row(tmp_path: Path, study: StudyResult) -> None:
    found = found_of(tmp_path, [study], (*TIMED, Arm("ds_w4", 1.8, 0.15, "deepspeed", W4)))
    assert "ds_w4" not in {row.arm for row in found}


def test_table_csv_and_figure_show_every_row(
    tmp_path: Path, study: StudyResult, longer: StudyResult
) -> None:
    arms = (*TIMED[:-1], replace(MINE, name="diff_g84h"))
    found = found_of(tmp_path, [study, longer], arms)
    lines = script.table(found).splitlines()
    assert lines[0].startswith(f"| {script.HEAD} |")
    assert len(lines) == 2 + len(found)
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert ["600 steps" in line for line in lines].count(True) == 1
    cells = list(csv.DictReader(io.StringIO(script.as_csv(found))))
    assert len(cells) == 2 * len(found)
    assert {c["arm"] for c in cells if c["over_twin"]} == {"diff_g84h"}
    assert {c["steps"] for c in cells} == {"", "300", "600"}
    drawn = script.draw(found)
    text = " ".join(ElementTree.fromstring(drawn).itertext())
    assert script.LINES["diff_g84h"].label in text
    assert script.LINES["zeropp"].label not in text  # it was not measured
    assert len(script.LINES) + 1 <= 5
    for line in (script.STRONGEST, *script.LINES.values()):
        assert f'"{line.light}"]{{fill:{line.dark}' in drawn


@pytest.mark.slow
def test_the_pages_say_what_the_kept_runs_give() -> None:
    slopes = Slopes.through(script.anchors())
    studies = [script.read_kept(name) for name in script.GAPS]
    found = script.rows_of(script.read_measured(), slopes, studies)
    page = (script.HERE / "README.md").read_text()
    assert script.table(found) in page, f"run {script.__file__}"
    assert (script.HERE / "time_to_loss.csv").read_text() == script.as_csv(found)
    for _, loss in script.losses_of(slopes, studies[-1:]):
        assert script.more_text(loss.more).partition(" (")[0] + " %" in page, loss.arm
    for value in (*slopes, *script.anchors().values()):
        assert f"{value:.3f}" in page
