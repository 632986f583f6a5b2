"""Error rates of whole studies, simulated with the dependence that a shared baseline makes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from statsmodels.stats.multitest import multipletests

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.study.judge.families import Entry, PValues, holm, replay

MARGIN = 0.006
ARMS = ("a", "b", "c", "d", "e", "f")
STUDIES = 800


def study(**changes: int) -> StudyConfig:
    arms = [ArmConfig("zero3"), *(ArmConfig(name) for name in ARMS)]
    return StudyConfig("s", "?", arms, [1, 2, 3, 4], **changes)


def simulated(
    what: StudyConfig, key: int, means: tuple[float, ...], sd: float = 0.003
) -> dict[str, PValues]:
    """One study: every arm minus the same baseline, so that the arms' gaps go together."""
    rng = np.random.default_rng([5, key])
    seeds = range(1, max(what.max_seeds, len(what.seeds)) + 1)
    noise = rng.normal(0, sd / 2**0.5, (len(means) + 1, len(seeds)))
    gaps = np.array(means)[:, None] + noise[1:] - noise[0]
    entries = {
        name: Entry(dict(zip(seeds, row, strict=True)), frozenset(seeds), MARGIN, member=True)
        for name, row in zip(ARMS, gaps, strict=False)
    }
    return dict(replay(what, entries).tests)


def share(what: StudyConfig, means: tuple[float, ...], claim: Callable[[PValues], bool]) -> int:
    """In how many of STUDIES at least one arm is claimed."""
    return sum(
        any(claim(t) for t in simulated(what, key, means).values()) for key in range(STUDIES)
    )


def differs(tests: PValues) -> bool:
    return tests.differs_corrected is not None and tests.differs_corrected < 0.05


def equal(tests: PValues) -> bool:
    return tests.equal_corrected is not None and tests.equal_corrected < 0.05


def beyond(tests: PValues) -> bool:
    return tests.beyond_corrected is not None and tests.beyond_corrected < 0.05


def plain_differs(tests: PValues) -> bool:
    return tests.differs is not None and tests.differs < 0.05


def most(probability: float) -> int:
    return int(binom.ppf(1 - 1e-6, STUDIES, probability))


NULL, AT_MARGIN = (0.0,) * 6, (MARGIN,) * 6
LOOKS = {"once": study(), "four looks": study(max_seeds=10, seeds_per_look=2)}
MORE_LOOKS_SLOWLY = pytest.mark.parametrize(
    "what",
    [LOOKS["once"], pytest.param(LOOKS["four looks"], marks=pytest.mark.slow)],
    ids=LOOKS,
)


@MORE_LOOKS_SLOWLY
def test_false_claims_of_a_difference_in_any_of_six_arms(what: StudyConfig) -> None:
    assert share(what, NULL, differs) <= most(0.05)
    assert share(what, NULL, plain_differs) > most(0.05)  # what the correction is for


@MORE_LOOKS_SLOWLY
def test_false_claims_of_equality_in_any_of_six_arms_at_the_margin(what: StudyConfig) -> None:
    assert share(what, AT_MARGIN, equal) <= most(0.05)


@MORE_LOOKS_SLOWLY
def test_false_claims_of_a_gap_beyond_the_margin_in_any_of_six_arms_at_it(
    what: StudyConfig,
) -> None:
    assert share(what, tuple(MARGIN * (-1) ** i for i in range(6)), beyond) <= most(0.05)


def test_a_gap_beyond_the_margin_differs_and_is_not_inside_it() -> None:
    what = LOOKS["four looks"]
    claimed = 0
    for key in range(60):
        for tests in simulated(what, key, (0.0, 0.004, 0.008, -0.008, 0.012, 0.02)).values():
            claimed += beyond(tests)
            assert differs(tests) or not beyond(tests)
            assert not (beyond(tests) and equal(tests))
    assert claimed > 60


def test_power() -> None:
    """Most equal arms are found equal, most real gaps found, and more with more looks."""
    means = (0.0, 0.0, 0.0, 0.02, 0.02, 0.02)
    found = {}
    for name, what in LOOKS.items():
        tests = [simulated(what, key, means, 0.0025) for key in range(150)]
        found[name] = (
            np.mean([[equal(t[a]) for a in "abc"] for t in tests]),
            np.mean([[differs(t[a]) for a in "def"] for t in tests]),
            np.mean([[beyond(t[a]) for a in "def"] for t in tests]),
        )
        assert found[name][1] > 0.95
        assert found[name][2] > 0.9
    assert found["once"][0] > 0.4
    assert found["four looks"][0] > 0.95


def test_a_decided_arm_gets_no_more_seeds_and_keeps_its_decision() -> None:
    what = study(max_seeds=8, seeds_per_look=2)
    same = {s: 0.0001 * (s % 2) for s in range(1, 9)}
    wide = {s: 0.01 * (-1) ** s for s in range(1, 9)}
    later = {s: 0.5 * (s > 4) + v for s, v in same.items()}  # what came after the decision
    first = frozenset({1, 2, 3, 4})
    entries = {"a": Entry(same, first, MARGIN, True), "b": Entry(wide, first, MARGIN, True)}
    seen = replay(what, entries)
    assert equal(seen.tests["a"])
    assert seen.missing == {"b": [5, 6]}
    entries["a"] = replace(entries["a"], gaps=later, ended=frozenset(later))
    entries["b"] = replace(entries["b"], ended=frozenset(wide))
    seen = replay(what, entries)
    assert equal(seen.tests["a"])
    assert (seen.tests["a"].looks, seen.tests["b"].looks) == (1, 3)
    assert not seen.missing  # the cap is reached


def test_a_look_counts_once_all_its_runs_have_ended() -> None:
    what = study(max_seeds=8, seeds_per_look=2)
    wide = {s: 0.01 * (-1) ** s for s in range(1, 5)} | {5: 0.0}
    a, b = (Entry(wide, frozenset(ended), MARGIN, True) for ended in ({1, 2, 3, 4, 5}, {1, 2, 3}))
    seen = replay(what, {"a": a, "b": b})
    assert seen.missing == {"b": [4]}
    seen = replay(what, {"a": a, "b": replace(b, ended=frozenset({1, 2, 3, 4}))})
    assert seen.missing == {"a": [6], "b": [5, 6]}
    assert seen.tests["a"].looks == 1  # seed 5 waits for seed 6


def test_a_look_at_a_gap_above_0_claims_nothing_of_one_below() -> None:
    what = study(max_seeds=8, seeds_per_look=4)
    first = {1: 0.0058, 2: 0.0059, 3: 0.0060, 4: 0.0061}  # differs, and of open size
    then = {5: -0.02, 6: -0.03, 7: -0.01, 8: -0.04}
    (early, late) = (
        replay(what, {"a": Entry(gaps, frozenset(gaps), MARGIN, True)}).tests["a"]
        for gaps in (first, first | then)
    )
    assert (early.looks, late.looks) == (1, 2)
    assert (differs(early), beyond(early), equal(early)) == (True, False, False)
    assert not differs(late)


def test_missing_seeds_are_corrected_by_the_number_of_looks() -> None:
    what = study(max_seeds=8, seeds_per_look=2)
    gaps = {1: 0.02, 2: 0.021, 4: 0.0213}
    tests = replay(what, {"a": Entry(gaps, frozenset({1, 2, 3, 4}), MARGIN, True)}).tests["a"]
    assert tests.differs is not None
    assert tests.differs_corrected == pytest.approx(3 * tests.differs)  # three planned looks


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_holm_is_that_of_statsmodels(values: list[float]) -> None:
    mine = holm({str(i): p for i, p in enumerate(values)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # it does so at every call: seconds of a large heap
        theirs = list(multipletests(values, method="holm")[1])
    assert list(mine.values()) == pytest.approx(theirs)
