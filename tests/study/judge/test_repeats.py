"""Baselines with several runs a seed, and the controls of all kinds beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.files import HELDOUT
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.answer import answer
from zpp_lab.study.judge.effects import cells_of
from zpp_lab.study.judge.verdict import StudyResult, judge_study
from zpp_lab.study.report.contents import opening
from zpp_lab.study.report.export import run_rows
from zpp_lab.study.report.style import GREYS, study_looks
from zpp_lab.study.report.table import console_table, verdict_rows
from zpp_lab.study.run.launch import next_seeds

from .test_verdict import BASE, run

ARMS = [
    ArmConfig("zero3", role="baseline"),
    ArmConfig("halved", role="baseline_repeat"),
    ArmConfig("reordered", role="order_control"),
    ArmConfig("sham", role="sham_control"),
    ArmConfig("arm", factors={"bits": 4}),
]
STUDY = StudyConfig("s", "?", ARMS, [1, 2, 3])
REPEAT = (0.002, -0.004, 0.006)  # off the baseline, by seed


def runs(arm: str, gaps: tuple[float, ...]) -> list[Run]:
    return [run(arm, s, BASE[s] + gap) for s, gap in zip(BASE, gaps, strict=False)]


def made(*more: Run, repeats: tuple[float, ...] = REPEAT) -> list[Run]:
    return [*runs("zero3", (0, 0, 0)), *runs("halved", repeats), *more]


def result(*more: Run, repeats: tuple[float, ...] = REPEAT) -> StudyResult:
    return judge_study(STUDY, made(*more, repeats=repeats))


def test_gaps_are_from_the_mean_of_the_baselines_runs() -> None:
    found = result(*runs("arm", (0.01, 0.01, 0.01)), *runs("reordered", (0, 0, 0)))
    base, repeat, order, _, arm = found.arms
    assert (base.verdict, repeat.text) == ("baseline", "baseline (repeats zero3)")
    assert arm.gaps == pytest.approx({1: 0.009, 2: 0.012, 3: 0.007})
    assert order.gaps == pytest.approx({1: -0.001, 2: 0.002, 3: -0.003})
    assert arm.margin == base.margin == pytest.approx(0.0025 * 2.4)
    assert [r.arm for r in found.base_runs(arm, 2)] == ["zero3", "halved"]
    assert "zero3 and its repeats (mean)" in console_table(found)
    assert [row["Gap (nats)"] for row in verdict_rows(found)][:2] == ["–", "–"]
    assert {row["role"] for row in run_rows([found], [Path()])} >= {"baseline"}


def test_a_repeat_that_has_not_finished_is_left_out_of_its_seed_and_named() -> None:
    found = result(*runs("arm", (0.01, 0.01, 0.01)), repeats=(0.002, -0.004))
    assert found.arms[-1].gaps == pytest.approx({1: 0.009, 2: 0.012, 3: 0.01})
    assert "halved: seed 3 has not been started." in found.notes


def test_repeats_get_the_seeds_that_their_arms_get() -> None:
    more = replace(STUDY, arms=[ARMS[0], ARMS[1], ARMS[4]], max_seeds=5)
    wide = judge_study(more, made(*runs("arm", (0.01, -0.02, 0.01))))
    assert next_seeds(more, wide) == {"zero3": [4], "halved": [4], "arm": [4]}


def test_documents_are_those_of_the_mean_too(tmp_path: Path) -> None:
    several = [replace(r, dir=tmp_path / r.dir) for r in made(*runs("arm", (0.01,) * 3))]
    rng, tokens = np.random.default_rng(0), np.array([50, 60, 70])
    nats = {}
    for one in several:
        nats[one.arm, one.seed] = rng.normal(2.4, 0.1, 3) * tokens
        one.dir.mkdir(parents=True)
        told = {"hash": "x", "documents": [0, 1, 2], "tokens": tokens.tolist()}
        told |= {"nats": nats[one.arm, one.seed].tolist()}
        (one.dir / HELDOUT).write_text(json.dumps(told))
    documents = judge_study(STUDY, several).arms[-1].documents
    assert documents is not None
    mean = (nats["zero3", 2] + nats["halved", 2]) / 2
    assert documents.nats[2] == pytest.approx(nats["arm", 2] - mean)


def test_a_sham_is_judged_as_arms_are_and_shown_with_the_controls() -> None:
    """Whatever its verdict, the others' stand; and it is no candidate."""
    for gaps in ((0.5, 0.51, 0.52), (0.0, 0.001, 0.002)):
        found = result(
            *runs("sham", gaps), *runs("arm", (0.9, 0.91, 0.92)), *runs("reordered", REPEAT)
        )
        sham = next(control for control in found.controls if control.role == "sham_control")
        assert (sham.verdict, sham.wrong, sham.waiting) == (found.arms[3].verdict, False, False)
        assert "sham" in str(opening(found).pairs)
        assert opening(found).wrong == []
        assert not any("sham" in line for line in answer(found))
        tests = found.arms[4].tests  # two arms in each family, the sham and this one
        assert tests.beyond is not None
        assert tests.beyond_corrected in (2 * tests.beyond, found.arms[3].tests.beyond_corrected)
    assert [cell.arm for cell in cells_of(found)] == ["arm"]
    assert study_looks(STUDY)["sham"] in GREYS
