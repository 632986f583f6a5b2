from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.claims import INSIDE, ON_PAR, ON_PAR_MARKED, UNDECIDED, VERDICTS
from zpp_lab.study.judge.verdict import ArmResult, StudyResult, judge_study, pairwise
from zpp_lab.study.run.launch import next_seeds

STUDY = StudyConfig(
    name="s", question="?", arms=[ArmConfig("zero3"), ArmConfig("arm")], seeds=[1, 2, 3]
)
BASE = {1: 2.40, 2: 2.38, 3: 2.42}


def run(arm: str, seed: int, loss: float | None = None, outcome: str = "") -> Run:
    summary: dict[str, Any] | None = None
    if loss is not None:
        sent = 100 if arm == "zero3" else 25
        summary = {"steps": 10, "heldout_loss": loss, "bytes": {}}
        summary["bytes"] = {"grads_inter": {"intra": sent, "inter": sent * 2}}
    failure = {"outcome": outcome, "error": "it broke\nhere"} if outcome else None
    return Run(Path(arm) / f"seed{seed}", arm, seed, {}, summary, failure)


def judged(*runs: Run, study: StudyConfig = STUDY) -> tuple[StudyResult, ArmResult]:
    base = [run("zero3", seed, loss) for seed, loss in BASE.items()]
    have = {(r.arm, r.seed) for r in runs}
    result = judge_study(study, [*runs, *(r for r in base if (r.arm, r.seed) not in have)])
    return result, result.arms[1]


def shifted(*gaps: float) -> list[Run]:
    return [run("arm", s, BASE[s] + gap) for s, gap in zip(BASE, gaps, strict=False)]


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([0.0001, -0.0002, 0.0003], "on par"),
        ([0.0020, 0.0021, 0.0022], ON_PAR_MARKED),
        ([-0.0020, -0.0021, -0.0022], ON_PAR_MARKED),
        ([0.05, 0.055, 0.06], "worse"),
        ([0.0055, 0.006, 0.0065], "above zero, size open"),  # cannot exclude one beyond the margin
        ([-0.0055, -0.006, -0.0065], "below zero, size open"),
        ([0.007, 0.009, 0.011], "above zero, size open"),  # nor one inside it
        ([-0.05, -0.055, -0.06], "better"),
        ([0.03, -0.02, 0.01], "undecided"),
        ([0.0, 0.0, 0.0], "on par"),
        ([0.004, 0.004, 0.004], ON_PAR_MARKED),
        ([0.02, 0.02, 0.02], "worse"),
        ([0.3], "undecided"),
    ],
)
def test_constructed_gaps(gaps: list[float], verdict: str) -> None:
    assert judged(*shifted(*gaps))[1].verdict == verdict  # the margin is 0.006


@pytest.mark.parametrize(
    ("tokens", "verdict", "warned"),
    [
        (71, "not judged", "fewer than 1,000"),
        (999, "not judged", "fewer than 1,000"),
        (1000, "worse", "fewer than 10,000"),
        (9999, "worse", "fewer than 10,000"),
        (10_000, "worse", ""),
        (None, "worse", ""),  # a run of a version that wrote no number, nor heldout.json
    ],
)
def test_few_heldout_tokens_give_no_verdict(tokens: int | None, verdict: str, warned: str) -> None:
    """Of whichever run of a pair, however clear the gap over seeds; more of these are no help."""
    control = ArmConfig("arm", role="negative_control")
    more = replace(STUDY, arms=[STUDY.arms[0], control], max_seeds=9)
    for side in ("arm", "zero3"):
        runs = [*shifted(0.5, 0.51, 0.52), run("zero3", 1, BASE[1])]
        for one in runs:
            if one.arm == side and tokens is not None:
                assert isinstance(one.summary, dict)
                one.summary["heldout_tokens"] = tokens
        result, arm = judged(*runs, study=more)
        assert arm.verdict == verdict
        assert arm.gap is not None
        told = [note for note in result.notes if "held-out tokens" in note]
        assert [warned in note for note in told] == [True] * bool(warned)
        (shown,) = result.controls
        assert shown.unanswered == (verdict == "not judged")
        if verdict == "not judged":
            assert f"{tokens} " in arm.note
            assert "1,000" in arm.note
            assert arm.tests.differs is arm.tests.equal is None
            assert next_seeds(more, result) == {}


def test_many_arms_are_corrected_and_controls_are_not() -> None:
    gaps = [0.0018, -0.0010, 0.0017]  # equal at 5 % alone, not among four
    names = ["arm", "b", "c", "d"]
    roles = {"b": "arm", "c": "arm", "d": "arm"}
    for others in (roles, dict.fromkeys(roles, "order_control")):
        arms = [ArmConfig("zero3"), ArmConfig("arm")]
        arms += [ArmConfig(name, role=role) for name, role in others.items()]
        study = replace(STUDY, arms=arms)
        runs = [run(n, s, BASE[s] + g) for n in names for s, g in zip(BASE, gaps, strict=True)]
        result, arm = judged(*runs, study=study)
        alone = arm.tests.equal
        assert alone is not None
        assert 0.0125 < alone < 0.05
        family = 4 if others is roles else 1
        assert arm.tests.equal_corrected == pytest.approx(family * alone)
        assert arm.verdict == ("undecided" if family == 4 else "on par")
        assert [c.ok for c in result.controls] == ([] if family == 4 else [True] * 3)


def test_controls_say_whether_they_came_out_as_they_must() -> None:
    arms = [ArmConfig("zero3"), ArmConfig("arm", role="negative_control")]
    study = replace(STUDY, arms=arms)
    for gaps, ok in (([0.5, 0.51, 0.52], True), ([0.0, 0.0001, 0.0], False)):
        (control,) = judged(*shifted(*gaps), study=study)[0].controls
        assert control.ok == ok
        assert ("must be worse" in control.text) != ok
    (control,) = judged(*shifted(0.5, 0.5), run("arm", 3, outcome="diverged"), study=study)[
        0
    ].controls
    assert (control.verdict, control.ok) == ("diverged", True)


def test_arms_are_paired_with_the_baseline_that_they_name() -> None:
    arms = [
        ArmConfig("zero3"),
        ArmConfig("arm"),
        ArmConfig("big", role="baseline"),
        ArmConfig("big_w4", against="big"),
    ]
    big = {1: 1.20, 2: 1.18, 3: 1.22}
    runs = [run("big", s, loss) for s, loss in big.items()]
    runs += [run("big_w4", s, loss + 0.0001 * s) for s, loss in big.items()]
    result, _ = judged(*runs, *shifted(0.0, 0.0, 0.0), study=replace(STUDY, arms=arms))
    verdicts = {arm.name: arm.verdict for arm in result.arms}
    assert verdicts == {"zero3": "baseline", "arm": "on par", "big": "baseline", "big_w4": "on par"}
    own = result.arms[3]
    assert own.gaps == pytest.approx({1: 0.0001, 2: 0.0002, 3: 0.0003})
    assert own.margin == pytest.approx(0.0025 * 1.2)
    assert result.baseline_of(own).name == "big"
    assert result.margin == pytest.approx(0.0025 * 2.4)


def test_missing_seeds_are_left_out_and_named() -> None:
    result, arm = judged(*shifted(0.05, 0.051))
    assert (arm.verdict, arm.gap and arm.gap.n) == ("worse", 2)
    assert result.notes == ["arm: seed 3 has not been started."]
    _, arm = judged(*shifted(0.05, 0.051, 0.052), run("zero3", 2, outcome="crashed"))
    assert sorted(arm.gaps) == [1, 3]


def test_runs_that_read_other_data_are_not_compared() -> None:
    """A gap between texts says nothing of the recipe: a pair of two is left out and named."""

    def read(text: str, *runs: Run) -> list[Run]:
        return [replace(r, summary={**(r.summary or {}), "data": {"hash": text}}) for r in runs]

    base = read("old text", *(run("zero3", seed, loss) for seed, loss in BASE.items()))
    other = read("new text", *shifted(0.0, 0.0, 0.0))
    result, arm = judged(*base, *other)
    assert arm.verdict == "not judged"
    assert "zero3" in arm.note
    assert arm.gaps == {}
    assert any("(new text for old text)" in note for note in result.notes)
    result, arm = judged(*base, *read("old text", *shifted(0.1)), *other[1:])
    assert arm.gaps == {1: pytest.approx(0.1)}
    assert any("seeds 2, 3 read other data than zero3" in note for note in result.notes)
    repeat = ArmConfig("again", role="baseline_repeat")
    repeated = [replace(r, arm="again") for r in read("new text", *shifted(0.0, 0.0, 0.0))]
    study = replace(STUDY, arms=[*STUDY.arms, repeat])
    same = read("old text", *shifted(0.0, 0.0, 0.0))
    repeated = [replace(r, summary={**(r.summary or {}), "heldout_loss": 9.0}) for r in repeated]
    result, arm = judged(*base, *same, *repeated, study=study)
    assert list(arm.gaps.values()) == pytest.approx([0.0, 0.0, 0.0]), "it is in no mean"
    assert any("again: seeds 1, 2, 3 read other data" in note for note in result.notes)


def test_divergence_is_a_verdict_of_its_own() -> None:
    result, arm = judged(*shifted(0.0, 0.0), run("arm", 3, outcome="diverged"))
    assert arm.text == "diverged (1 of 3 seeds)"
    assert result.notes == ["arm: seed 3 diverged before step 1 (it broke)."]
    _, arm = judged(run("arm", 1, float("nan")))
    assert arm.verdict == "diverged"
    both = [run("arm", 3, outcome="diverged"), run("zero3", 3, outcome="diverged")]
    assert judged(*shifted(0.05, 0.051), *both)[1].verdict == "worse"


@pytest.mark.parametrize("outcome", ["crashed", "out_of_memory"])
def test_failed_runs_leave_the_others_to_judge(outcome: str) -> None:
    _, arm = judged(*shifted(0.05, 0.051), run("arm", 3, outcome=outcome))
    assert arm.verdict == "worse"
    _, arm = judged(*(run("arm", seed, outcome=outcome) for seed in BASE))
    assert arm.text == f"failed ({outcome.replace('_', ' ')} before step 1)"
    _, arm = judged(run("arm", 1, outcome="interrupted"))
    assert arm.text == "unfinished (1 of 3 runs began; the furthest is before step 1)"


def test_without_a_baseline_nothing_is_judged() -> None:
    result = judge_study(STUDY, shifted(0.0, 0.0, 0.0))
    assert result.margin is None
    assert [arm.verdict for arm in result.arms] == ["not run", "no baseline"]
    assert result.arms[1].verdict == "no baseline"
    assert result.arms[0].text == "not run (never started)"


def test_arms_and_seeds_outside_the_study_are_left_out() -> None:
    result, arm = judged(*shifted(0.0, 0.0, 0.0), run("other", 1, 9.0), run("arm", 9, 9.0))
    assert sorted(arm.gaps) == [1, 2, 3]
    assert [note.split()[1] for note in result.notes] == ["other"]


def shows(arm: ArmResult) -> tuple[bool, bool, bool]:
    """What the interval beside a verdict says: without 0, inside the margin, beyond it."""
    assert arm.gap is not None
    assert arm.gap.deciding is not None
    (low, high), margin = arm.gap.deciding, arm.margin or 0.0
    inside = -margin < low and high < margin
    return low > 0 or high < 0, inside, low > margin or high < -margin


@pytest.mark.parametrize("seeds", [3, 5])
def test_an_interval_agrees_with_the_verdict_beside_it(seeds: int) -> None:
    """Whatever the corrections make of the levels; against the baseline and between arms."""
    seen: set[str] = set()
    agreed = 0
    arms = [ArmConfig("zero3"), *(ArmConfig(f"arm{i}") for i in range(6))]
    study = replace(STUDY, arms=arms, seeds=list(range(1, seeds + 1)))
    for key in range(40):
        rng = np.random.default_rng([3, key])
        losses = 2.4 + rng.normal(0, 0.02, seeds)
        runs = [run("zero3", s, loss) for s, loss in enumerate(losses, 1)]
        for arm in arms[1:]:
            gaps = rng.normal(rng.normal(0, 0.006), rng.choice([0.0005, 0.002]), seeds)
            runs += [run(arm.name, s, x) for s, x in enumerate(losses + gaps, 1)]
        found = judge_study(study, runs)
        for one in (*found.arms[1:], *(pair for _, _, pair in pairwise(found))):
            shown, seen = shows(one), {*seen, one.verdict}
            inside, beyond = one.verdict in INSIDE, one.verdict in ("worse", "better")
            claimed = (one.verdict not in (ON_PAR, UNDECIDED), inside, beyond)
            assert all(s for s, c in zip(shown, claimed, strict=True) if c), one.verdict
            p = (one.gap.p_differs, 2 * one.gap.p_equal, one.gap.p_beyond)
            made = max((v for v, c in zip(p, claimed, strict=True) if c), default=0.0)
            left = min((v for v, c in zip(p, claimed, strict=True) if not c), default=2.0)
            if made < 0.99 * left:  # else no interval can: the test of inside has one side
                assert shown == claimed, one.verdict
                agreed += 1
    assert seen == set(VERDICTS)
    assert agreed > 0.95 * 40 * 21


def test_pairs_are_a_family_of_their_own() -> None:
    """A control is in none; an arm without a verdict neither."""
    names = ("zero3", "w8", "w4", "w2", "broken")
    arms = [ArmConfig(name) for name in names]
    arms[-1] = replace(arms[-1], role="negative_control")
    gaps = {"zero3": 0.0, "w8": 0.0, "w4": 0.02, "broken": 1.0}
    rng = np.random.default_rng(1)
    runs = [
        run(name, s, BASE[s] + gap + rng.normal(0, 1e-4))
        for name, gap in gaps.items()
        for s in BASE
    ]
    ((one, other, apart),) = pairwise(judge_study(replace(STUDY, arms=arms), runs))
    assert (one, other, apart.verdict) == ("w8", "w4", "better")
    assert apart.tests.differs == apart.tests.differs_corrected  # of one pair
    many = [*arms[:1], *(ArmConfig(f"w{i}") for i in range(13))]
    runs = [run(arm.name, s, BASE[s]) for arm in many for s in BASE]
    assert not pairwise(judge_study(replace(STUDY, arms=many), runs)), "78 pairs show nothing"
