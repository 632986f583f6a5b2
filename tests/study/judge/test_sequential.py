from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.verdict import StudyResult, judge_study
from zpp_lab.study.run.launch import next_seeds

STUDY = StudyConfig(
    name="s",
    question="?",
    arms=[
        ArmConfig("zero3"),
        ArmConfig("same"),
        ArmConfig("wide"),
        ArmConfig("broken", role="negative_control"),
    ],
    seeds=[1, 2, 3],
    max_seeds=9,
    seeds_per_look=2,
)
GAPS = {"zero3": (0.0, 0.0), "same": (0.0, 1e-4), "wide": (0.004, 0.008), "broken": (0.5, 0.05)}


def run(arm: str, seed: int, outcome: str = "finished") -> Run:
    mean, sd = GAPS[arm]
    shared = np.random.default_rng(seed).normal(0, 0.02)
    own = np.random.default_rng([seed, *arm.encode()]).normal(mean, sd)
    summary: dict[str, Any] | None = None
    if outcome == "finished":
        sent = {"grads_inter": {"intra": 1, "inter": 2}}
        summary = {"steps": 10, "heldout_loss": 2.4 + shared + own, "bytes": sent}
    failure = None if summary or outcome == "unfinished" else {"outcome": outcome, "error": "x"}
    return Run(Path(arm) / f"seed{seed}", arm, seed, {}, summary, failure)


def first_look() -> list[Run]:
    return [run(arm.name, seed) for arm in STUDY.arms for seed in STUDY.seeds]


def judged(runs: list[Run], study: StudyConfig = STUDY) -> StudyResult:
    return judge_study(study, runs)


def to_the_end(runs: list[Run], study: StudyConfig = STUDY) -> tuple[list[Run], list[dict]]:
    """Run what `next_seeds` asks for until it asks for nothing."""
    runs, asked = list(runs), []
    while more := next_seeds(study, judged(runs, study)):
        asked.append(more)
        runs += [run(arm, seed) for arm, seeds in more.items() for seed in seeds]
    return runs, asked


def test_undecided_arms_get_seeds_with_their_baseline_until_the_cap() -> None:
    runs, asked = to_the_end(first_look())
    assert asked[0] == {"zero3": [4, 5], "wide": [4, 5]}
    assert list(asked[0]) == ["zero3", "wide"]
    result = judged(runs)
    seeds = {arm.name: len(arm.runs) for arm in result.arms}
    assert seeds["same"] == seeds["broken"] == 3
    assert seeds["wide"] == seeds["zero3"] > 3
    wide = result.arms[2]
    assert wide.verdict != "undecided" or seeds["wide"] == STUDY.max_seeds
    assert not result.notes  # no seed that was never asked for is missed


def test_a_study_killed_at_any_moment_asks_for_the_same_runs() -> None:
    whole, _ = to_the_end(first_look())
    later = [r for r in whole if r.seed > 3]
    rng = np.random.default_rng(0)
    for _ in range(10):
        kept = [r for r in later if r.seed <= rng.integers(4, 10) and rng.random() < 0.6]
        runs, _ = to_the_end([*first_look(), *kept])
        assert {(r.arm, r.seed) for r in runs} == {(r.arm, r.seed) for r in whole}
        assert [a.verdict for a in judged(runs).arms] == [a.verdict for a in judged(whole).arms]


def test_an_unfinished_first_look_is_finished_first() -> None:
    runs = [r for r in first_look() if (r.arm, r.seed) not in (("same", 2), ("zero3", 3))]
    assert next_seeds(STUDY, judged(runs)) == {"zero3": [3], "same": [2]}


def test_failed_runs_are_not_asked_for_again() -> None:
    runs = [r for r in first_look() if (r.arm, r.seed) != ("wide", 3)]
    assert next_seeds(STUDY, judged([*runs, run("wide", 3, "crashed")])) == {
        "zero3": [4, 5],
        "wide": [4, 5],
    }
    assert next_seeds(STUDY, judged([*runs, run("wide", 3, "diverged")])) == {}
