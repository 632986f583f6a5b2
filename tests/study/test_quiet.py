"""The quiet part of training: where it ends, and what arms' gaps are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_runs import ARMS, change_metrics, fake_study, write_study_runs
from zpp_lab.config import StudyConfig
from zpp_lab.study.certainty import COLUMNS, certainty
from zpp_lab.study.quiet import SHARE, Quiet, quiet_parts
from zpp_lab.study.runs import find_runs
from zpp_lab.study.verdict import StudyResult, judge_study

STEPS = 40
Gaps = Mapping[tuple[str, int], Sequence[float]]


def judged(root: Path, gaps: Gaps, seeds: int = 1, control: bool = True) -> StudyResult:
    """A study whose arms' training losses are 3 plus these gaps, then 0, in nats."""
    names = {"zero3", *(arm for arm, _ in gaps)} | ({"zero3_reordered"} if control else set())
    study = fake_study(tuple(arm for arm in ARMS if arm.name in names), seeds)
    roles = {"zero3_reordered": "order_control"}
    arms = [replace(arm, role=roles.get(arm.name, "arm")) for arm in study.arms]
    study = StudyConfig(**{**study.__dict__, "arms": arms})
    write_study_runs(root, study, steps=STEPS)
    for arm in names:
        for seed in study.seeds:
            own = [*gaps.get((arm, seed), ()), *[0.0] * STEPS]

            def change(row: dict[str, Any], own: Sequence[float] = own) -> None:
                row["loss"] = 3.0 + own[row["step"] - 1]

            change_metrics(root / arm / f"seed{seed}", change)
    return judge_study(study, find_runs(root))


def part(result: StudyResult) -> Quiet:
    (found,) = quiet_parts(result)
    return found


def test_it_ends_before_the_first_step_that_parts_equal_runs(tmp_path: Path) -> None:
    control = [*[0.0] * 11, -0.5, 0.0]
    found = part(judged(tmp_path, {("zero3_reordered", 1): control, ("w4", 1): [0.25] * 12}))
    assert (found.baseline, found.controls) == ("zero3", ["zero3_reordered"])
    assert (found.end, found.whole, found.noise) == (11, False, 0.0)
    w4 = next(arm for arm in found.arms if arm.arm == "w4")
    assert (w4.mean, w4.largest) == (0.25, 0.25)
    assert found.text.startswith("Up to step 11 the training loss of zero3_reordered is within")


def test_the_earliest_seed_ends_it_and_arms_are_averaged_over_seeds(tmp_path: Path) -> None:
    gaps = {
        ("zero3_reordered", 1): [*[0.0] * 20, 1.0],
        ("zero3_reordered", 2): [*[0.0] * 10, 1.0],
        ("w4", 1): [0.5] * STEPS,
        ("w4", 2): [-0.25] * STEPS,
    }
    found = part(judged(tmp_path, gaps, seeds=2))
    assert found.end == 10
    w4 = next(arm for arm in found.arms if arm.arm == "w4")
    assert (w4.mean, w4.largest) == (0.125, 0.5)


def test_a_hundredth_of_the_margin_is_nothing(tmp_path: Path) -> None:
    result = judged(tmp_path, {("w4", 1): []})
    limit = SHARE * (result.baseline.margin or 0.0)
    assert limit > 0
    inside = judged(tmp_path / "a", {("zero3_reordered", 1): [0.9 * limit] * STEPS})
    assert (part(inside).end, part(inside).whole) == (STEPS, True)
    assert part(inside).noise == pytest.approx(0.9 * limit)
    assert quiet_parts(judged(tmp_path / "b", {("zero3_reordered", 1): [1.1 * limit]})) == []


def test_the_report_has_it_beside_each_gap(tmp_path: Path) -> None:
    found = certainty(judged(tmp_path, {("w4", 1): [0.25] * STEPS}))
    at = COLUMNS.index("Gap, quiet part")
    cells = {row[0]: row[at] for row in found.rows()}
    assert cells == {"w4": "+0.2500, at most 0.2500", "zero3_reordered": "0.0000, at most 0.0000"}
    assert found.lines()[-1].startswith("In all 40 steps the training loss of zero3_reordered")


def test_without_an_order_control_nothing_is_said(tmp_path: Path) -> None:
    assert quiet_parts(judged(tmp_path, {("w4", 1): [0.5]}, control=False)) == []


def test_a_lost_loss_ends_what_is_compared(tmp_path: Path) -> None:
    lost = [*[0.125] * 4, float("nan"), *[9.0] * 9]
    found = part(judged(tmp_path, {("w4", 1): lost}))
    assert found.whole
    w4 = next(arm for arm in found.arms if arm.arm == "w4")
    assert (w4.mean, w4.largest) == (0.125, 0.125)
