from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.files import HELDOUT
from zpp_lab.runs.reader import find_runs, write_study
from zpp_lab.study.judge.certainty import COLUMNS, certainty
from zpp_lab.study.judge.documents import read_documents
from zpp_lab.study.judge.noise import noise_floors
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import judge_study, read_result
from zpp_lab.study.report.table import interval_line, margin_line

from .test_verdict import run as one_run

KEPT = (ARMS[0], ARMS[1], ARMS[5])  # zero3, zero3_reordered, w4


def folder(root: Path, seeds: int = 3) -> Path:
    study = fake_study(KEPT, seeds)
    write_study_runs(root, study, steps=2)
    write_study(root, study)
    return root


def add_documents(root: Path, count: int = 40, name: str = "same") -> None:
    """heldout.json in every run folder, so that its mean is the run's held-out loss."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(20, 200, count)
    for run in find_runs(root):
        assert run.heldout_loss is not None
        noise = rng.normal(0, 0.01, count)
        loss = run.heldout_loss + noise - noise @ tokens / tokens.sum()
        found = {"hash": name, "documents": list(range(count)), "tokens": tokens.tolist()}
        (run.dir / HELDOUT).write_text(json.dumps(found | {"nats": (loss * tokens).tolist()}))


def test_gaps_over_documents(tmp_path: Path) -> None:
    add_documents(folder(tmp_path))
    result = read_result(tmp_path)
    base, _, w4 = result.arms
    assert base.documents is None
    assert w4.gap is not None
    assert w4.gap.documents is not None
    assert w4.documents is not None
    assert sum(w4.documents.interval(0.95)) / 2 == pytest.approx(w4.gap.mean, abs=1e-12)
    assert (len(w4.documents.tokens), sorted(w4.documents.nats)) == (40, [1, 2, 3])
    assert w4.gap.interval == pytest.approx(
        t_interval(list(w4.gaps.values()), 0.95, w4.documents.part(w4.gaps))
    )
    assert interval_line(result) == "over seeds and 40 held-out documents"
    told = certainty(result)
    reordered, row = told.rows()
    assert len(row) == len(reordered) == len(COLUMNS)
    assert row[0] == "w4"
    assert " to " in row[-2]
    assert " 40 (" in told.lines()[0]


def test_runs_without_documents_are_left_out(tmp_path: Path) -> None:
    result = read_result(folder(tmp_path))
    assert [arm.documents for arm in result.arms] == [None] * 3
    assert "over seeds alone" in margin_line(result)  # said, not passed over
    assert [row[-1] for row in certainty(result).rows()] == ["–", "–"]
    add_documents(tmp_path)
    (tmp_path / "w4" / "seed2" / HELDOUT).unlink()
    w4 = read_result(tmp_path).arms[2]
    assert w4.documents is not None
    assert sorted(w4.documents.nats) == [1, 3]
    for seed in (1, 3):
        (tmp_path / "w4" / f"seed{seed}" / HELDOUT).unlink()
    said = interval_line(read_result(tmp_path))
    assert said.endswith(": w4)")


def test_other_tokens_are_never_compared(tmp_path: Path) -> None:
    add_documents(folder(tmp_path))
    for seed in (1, 2, 3):
        path = tmp_path / "w4" / f"seed{seed}" / HELDOUT
        path.write_text(path.read_text().replace('"same"', '"other"'))
    assert [bool(arm.documents) for arm in read_result(tmp_path).arms] == [False, True, False]


def test_broken_files_are_named(tmp_path: Path) -> None:
    for text in ("{", '{"hash": "a"}', '{"hash":"a","documents":[1],"tokens":[],"nats":[]}'):
        (tmp_path / HELDOUT).write_text(text)
        with pytest.raises(ValueError, match=r"heldout\.json"):
            read_documents(tmp_path)


def test_noise_floor_of_seeds_and_of_order(tmp_path: Path) -> None:
    (floor,) = noise_floors(read_result(folder(tmp_path, seeds=5)))
    losses = [r.heldout_loss for r in find_runs(tmp_path / "zero3") if r.heldout_loss]
    assert floor.spread == pytest.approx(np.std(losses, ddof=1))
    assert (floor.baseline, floor.seeds) == ("zero3", 5)
    assert floor.unpaired > floor.spread
    assert floor.seeds_paired is not None
    assert floor.seeds_unpaired is not None
    assert floor.seeds_paired < floor.seeds_unpaired  # what pairing is for
    assert "Without pairing" in floor.lines[0]
    study = fake_study(KEPT, 5)
    arms = [replace(a, role="order_control") if "reorder" in a.name else a for a in study.arms]
    (floor,) = noise_floors(read_result(tmp_path, replace(study, arms=arms)))
    (order,) = floor.orders
    assert order.arm == "zero3_reordered"
    assert order.largest < 0.002 < floor.spread
    assert order.arm in floor.lines[-1]


def test_arms_of_which_pairing_takes_little_noise_off_are_named() -> None:
    losses = dict(enumerate((2.40, 2.43, 2.38, 2.45, 2.41, 2.36, 2.42, 2.39), 1))
    strays = dict(enumerate((2.41, 2.37, 2.44, 2.40, 2.38, 2.43, 2.36, 2.42), 1))
    made = {"zero3": losses, "w8": {s: v + 0.001 * s for s, v in losses.items()}}
    made |= {"w4": strays, "zero3_reordered": strays, "broken": strays}
    roles = {"zero3": "baseline", "zero3_reordered": "order_control", "broken": "negative_control"}
    arms = [ArmConfig(arm, role=roles.get(arm, "arm")) for arm in made]
    runs = [one_run(arm, s, loss) for arm, own in made.items() for s, loss in own.items()]
    (floor,) = noise_floors(judge_study(StudyConfig("s", "?", arms, list(losses)), runs))
    assert (floor.apart, floor.helped) == (["w4"], 1)  # without controls of known verdict
    assert any("gaps of w4. " in line for line in floor.lines)
    few = StudyConfig("s", "?", arms, [1, 2, 3, 4, 5, 6, 7])
    (floor,) = noise_floors(judge_study(few, [r for r in runs if r.seed < 8]))
    assert not floor.apart  # so few seeds may look so by chance
