"""Steps in which one run's gradient jumps alone: which are found, and what a report says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.study.fake_runs import ARMS, change_metrics, fake_study, write_study_runs
from zpp_lab.config import StudyConfig
from zpp_lab.study.apart import NAMED, apart_lines, apart_steps
from zpp_lab.study.certainty import certainty
from zpp_lab.study.runs import find_runs
from zpp_lab.study.verdict import StudyResult, judge_study

STEPS = 20
NAMES = [arm.name for arm in ARMS][:4]
Jumps = Mapping[tuple[str, int, int], float]  # arm, seed, step → times the usual norm


def judged(root: Path, jumps: Jumps, seeds: int = 1, roles: Mapping[str, str] = {}) -> StudyResult:
    """Four arms whose norms are 3 in odd steps and 5 in even ones, times `jumps`."""
    study = fake_study(ARMS[:4], seeds)
    arms = [replace(arm, role=roles.get(arm.name, "arm")) for arm in study.arms]
    study = StudyConfig(**{**study.__dict__, "arms": arms})
    write_study_runs(root, study, steps=STEPS)
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
    result = judged(tmp_path, {**all_jump, (NAMES[0], 1, 4): 2.5, (NAMES[2], 1, 12): 4.0})
    assert found(result) == [(NAMES[2], 1, 12), (NAMES[0], 1, 4)]
    first, second = apart_steps(result)
    assert (first.norm, first.others, second.norm, second.others) == (20.0, 5.0, 12.5, 5.0)


def test_an_arm_that_is_always_larger_does_not_stand_apart(tmp_path: Path) -> None:
    larger = {(NAMES[1], 1, step): 6.0 for step in range(1, 10)}
    assert found(judged(tmp_path, larger)) == []


def test_seeds_are_compared_with_their_own_twins(tmp_path: Path) -> None:
    second = {(name, 2, step): 8.0 for name in NAMES for step in range(1, STEPS + 1)}
    assert found(judged(tmp_path, {**second, (NAMES[3], 1, 2): 3.0}, seeds=2)) == [(NAMES[3], 1, 2)]


def test_a_negative_control_is_no_twin(tmp_path: Path) -> None:
    jumps = {(NAMES[0], 1, 5): 3.0, (NAMES[3], 1, 9): 3.0}
    assert found(judged(tmp_path, jumps, roles={NAMES[3]: "negative_control"})) == [
        (NAMES[0], 1, 5)
    ]


def test_two_runs_cannot_say_which_of_them_jumps(tmp_path: Path) -> None:
    result = judged(tmp_path, {(NAMES[0], 1, 5): 9.0})
    few = replace(result, arms=result.arms[:2])
    assert apart_steps(few) == []


def test_norms_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    result = judged(tmp_path, {(NAMES[0], 1, 5): 3.0})
    file = tmp_path / NAMES[1] / "seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["grad_norm"] = float("inf")
    del rows[5]["grad_norm"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 21, "gr')
    assert found(result) == [(NAMES[0], 1, 5)]


def test_the_report_names_the_furthest(tmp_path: Path) -> None:
    assert apart_lines([]) == []
    jumps = {(NAMES[0], 1, step): 2.0 + step for step in (1, 5, 9, 13, 17)}
    jumps |= {(NAMES[1], 1, 3): 4.0, (NAMES[1], 1, 15): 4.5}
    result = judged(tmp_path, jumps)
    steps = apart_steps(result)
    assert len(steps) == NAMED + 1
    (line,) = apart_lines(steps)
    assert "in 7 steps of 2 runs" in line
    assert f"the furthest {NAMES[0]} seed 1 step 17 (57 for 3), {NAMES[0]} seed 1 step 13" in line
    assert line.count("seed 1 step") == NAMED
    assert line in certainty(result).lines()
