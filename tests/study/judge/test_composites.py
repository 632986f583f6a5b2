"""Means over arms that a study declares: judged like an arm, paired by seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from zpp_lab.config.study import ArmConfig, CompositeConfig, StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.families import Entry, PValues, replay
from zpp_lab.study.judge.verdict import StudyResult, judge_study, pairwise
from zpp_lab.study.run.launch import next_seeds

from .test_sequential import run as drawn
from .test_verdict import BASE, run

ALL = CompositeConfig("all_w4", ["w4_*"], describe="every arm of 4 bits")
ARMS = [ArmConfig(name) for name in ("zero3", "w4_32", "w4_64", "w8")]
STUDY = StudyConfig("s", "?", ARMS, [1, 2, 3], composites=[ALL])


def judged(gaps: dict[str, list[float]], study: StudyConfig = STUDY) -> StudyResult:
    runs: list[Run] = [run("zero3", seed, loss) for seed, loss in BASE.items()]
    for arm, own in gaps.items():
        runs += [run(arm, s, BASE[s] + gap) for s, gap in zip(BASE, own, strict=False)]
    return judge_study(study, runs)


def test_the_mean_over_arms_is_judged_by_seed() -> None:
    """The arms' noise, which goes up where the other's goes down, is gone from the mean."""
    found = judged({"w4_32": [0.02, 0.0, 0.04], "w4_64": [0.02, 0.0401, 0.0002], "w8": [0, 0, 0]})
    (both,) = found.composites
    assert both.gaps == pytest.approx({1: 0.02, 2: 0.02005, 3: 0.0201})
    assert [arm.verdict for arm in found.every] == [
        *("baseline", "undecided", "undecided", "on par", "worse")
    ]


def test_only_seeds_that_all_arms_have_count() -> None:
    (both,) = judged({"w4_32": [0.02, 0.021, 0.022], "w4_64": [0.02, 0.021]}).composites
    assert sorted(both.gaps) == [1, 2]
    (both,) = judged({"w4_32": [0.02, 0.021, 0.022]}).composites
    assert (both.text, both.gap) == ("not run (w4_64)", None)


@pytest.mark.parametrize(
    ("composite", "wrong"),
    [
        (CompositeConfig("w8", ["w4_*"]), "has this name already"),
        (CompositeConfig("x", ["w5_*"]), "'w5_"),
        (CompositeConfig("x", ["zero3"]), "a baseline"),
        (CompositeConfig("x", []), "arms is empty"),
        (CompositeConfig("x", ["w4_*"], ["w4_32"]), "minus"),
    ],
)
def test_wrong_composites_are_refused(composite: CompositeConfig, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        replace(STUDY, composites=[composite])


def test_it_asks_for_no_seeds_and_is_judged_while_all_its_arms_run() -> None:
    arms = [ArmConfig(name) for name in ("zero3", "same", "wide")]
    both = CompositeConfig("both", ["same", "wide"])
    study = StudyConfig("s", "?", arms, [1, 2, 3], max_seeds=7, seeds_per_look=2, composites=[both])
    runs = [drawn(arm.name, seed) for arm in arms for seed in study.seeds]
    assert next_seeds(study, judge_study(study, runs)) == {"zero3": [4, 5], "wide": [4, 5]}
    more = [drawn(arm, seed) for arm in ("zero3", "wide") for seed in (4, 5)]
    found = judge_study(study, [*runs, *more])
    assert [len(arm.gaps) for arm in found.every] == [5, 3, 5, 3]
    assert [arm.tests.looks for arm in found.every[1:]] == [1, 2, 1]
    assert np.isfinite(found.composites[0].gap.mean if found.composites[0].gap else np.nan)


def test_a_composite_errs_no_more_often_though_its_arms_stop_when_they_like() -> None:
    """Studies as they run: an arm that is decided gets no further seeds, and its composite stops
    with it. One arm of each is often decided early, as its spread is small."""
    margin, studies, wrong = 0.006, 600, {"differs": 0, "equal": 0, "beyond": 0}
    arms = [ArmConfig(name) for name in ("zero3", "a", "b")]
    study = StudyConfig("s", "?", arms, [1, 2, 3], max_seeds=7, seeds_per_look=2)
    for key in range(studies):
        for gap, claims in ((0.0, ["differs"]), (margin, ["equal", "beyond"])):
            found = replay_as_it_runs(study, np.random.default_rng([key]), gap, margin)
            for claim in claims:
                p = getattr(found, f"{claim}_corrected")
                wrong[claim] += p is not None and p < 0.05
    assert max(wrong.values()) <= int(binom.ppf(1 - 1e-4, studies, 0.05))


def replay_as_it_runs(
    study: StudyConfig, rng: np.random.Generator, gap: float, margin: float
) -> PValues:
    """The tests of the mean of two arms at the end, by itself in its families."""
    draws = {"a": rng.normal(gap, 0.002, 7), "b": rng.normal(gap, 0.02, 7)}
    done = dict.fromkeys(draws, 3)
    while True:
        shared = min(done.values())
        gaps = {n: dict(enumerate(draws[n][: done[n]], 1)) for n in draws}
        entries = {n: Entry(g, frozenset(g), margin, member=False) for n, g in gaps.items()}
        mean = {s: (gaps["a"][s] + gaps["b"][s]) / 2 for s in range(1, shared + 1)}
        entries["mean"] = Entry(mean, frozenset(mean), margin, member=True, asks=False)
        seen = replay(study, entries)
        if not seen.missing:
            return seen.tests["mean"]
        for name, seeds in seen.missing.items():
            done[name] = max(seeds)


def test_arms_of_a_study_with_a_composite_are_compared_with_each_other() -> None:
    found = judged({"w4_32": [0.02, 0.021, 0.022], "w4_64": [0.0, 0.0001, 0.0002]})
    ((one, other, apart),) = pairwise(found)
    assert (one, other) == ("w4_32", "w4_64")
    assert list(apart.gaps.values()) == pytest.approx([0.02, 0.0209, 0.0218])
