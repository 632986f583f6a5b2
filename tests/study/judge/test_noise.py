"""The quiet part of training, and steps in which one run's gradient jumps alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_runs import ARMS, change_metrics, fake_study, write_study_runs
from zpp_lab.config.study import StudyConfig
from zpp_lab.runs.reader import find_runs
from zpp_lab.study.judge.noise import QUIET, Quiet, apart_steps, quiet_parts
from zpp_lab.study.judge.verdict import StudyResult, judge_study

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
    assert (found.end, found.noise) == (11, 0.0)
    assert found.arms["w4"] == (0.25, 0.25)


def test_the_earliest_seed_ends_it_and_arms_are_averaged_over_seeds(tmp_path: Path) -> None:
    gaps = {
        ("zero3_reordered", 1): [*[0.0] * 20, 1.0],
        ("zero3_reordered", 2): [*[0.0] * 10, 1.0],
        ("w4", 1): [0.5] * STEPS,
        ("w4", 2): [-0.25] * STEPS,
    }
    found = part(judged(tmp_path, gaps, seeds=2))
    assert found.end == 10
    assert found.arms["w4"] == (0.125, 0.5)


def test_a_hundredth_of_the_margin_is_nothing(tmp_path: Path) -> None:
    result = judged(tmp_path, {("w4", 1): []})
    limit = QUIET * (result.baseline.margin or 0.0)
    assert limit > 0
    inside = judged(tmp_path / "a", {("zero3_reordered", 1): [0.9 * limit] * STEPS})
    assert part(inside).end == STEPS
    assert part(inside).noise == pytest.approx(0.9 * limit)
    assert quiet_parts(judged(tmp_path / "b", {("zero3_reordered", 1): [1.1 * limit]})) == []


def test_a_lost_loss_ends_what_is_compared(tmp_path: Path) -> None:
    lost = [*[0.125] * 4, float("nan"), *[9.0] * 9]
    found = part(judged(tmp_path, {("w4", 1): lost}))
    assert found.arms["w4"] == (0.125, 0.125)


# ---------------------------------------------------------------------- steps apart


SHORT = 20
NAMES = [arm.name for arm in ARMS][:4]
Jumps = Mapping[tuple[str, int, int], float]  # arm, seed, step → times the usual norm


def jumping(root: Path, jumps: Jumps, seeds: int = 1, roles: Mapping[str, str] = {}) -> StudyResult:
    """Four arms whose norms are 3 in odd steps and 5 in even ones, times `jumps`."""
    study = fake_study(ARMS[:4], seeds)
    arms = [replace(arm, role=roles.get(arm.name, "arm")) for arm in study.arms]
    study = StudyConfig(**{**study.__dict__, "arms": arms})
    write_study_runs(root, study, steps=SHORT)
    for arm in NAMES:
        for seed in study.seeds:

            def change(row: dict[str, Any], arm: str = arm, seed: int = seed) -> None:
                usual = 3.0 if row["step"] % 2 else 5.0
                row["grad_norm"] = usual * jumps.get((arm, seed, row["step"]), 1.0)

            change_metrics(root / arm / f"seed{seed}", change)
    return judge_study(study, find_runs(root))


def found(result: StudyResult) -> list[tuple[str, int, int]]:
    return [(one.arm, one.seed, one.step) for one in apart_steps(result)]


def test_a_jump_of_one_run_is_found_and_one_of_all_is_not(tmp_path: Path) -> None:
    all_jump = {(name, 1, 7): 9.0 for name in NAMES}
    result = jumping(tmp_path, {**all_jump, (NAMES[0], 1, 4): 2.5, (NAMES[2], 1, 12): 4.0})
    assert found(result) == [(NAMES[2], 1, 12), (NAMES[0], 1, 4)]
    first, second = apart_steps(result)
    assert (first.norm, first.others, second.norm, second.others) == (20.0, 5.0, 12.5, 5.0)


def test_seeds_are_compared_with_their_own_twins(tmp_path: Path) -> None:
    second = {(name, 2, step): 8.0 for name in NAMES for step in range(1, SHORT + 1)}
    assert found(jumping(tmp_path, {**second, (NAMES[3], 1, 2): 3.0}, seeds=2)) == [
        (NAMES[3], 1, 2)
    ]


def test_a_negative_control_is_no_twin(tmp_path: Path) -> None:
    jumps = {(NAMES[0], 1, 5): 3.0, (NAMES[3], 1, 9): 3.0}
    assert found(jumping(tmp_path, jumps, roles={NAMES[3]: "negative_control"})) == [
        (NAMES[0], 1, 5)
    ]


def test_norms_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    result = jumping(tmp_path, {(NAMES[0], 1, 5): 3.0})
    file = tmp_path / NAMES[1] / "seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["grad_norm"] = float("inf")
    del rows[5]["grad_norm"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 21, "gr')
    assert found(result) == [(NAMES[0], 1, 5)]
