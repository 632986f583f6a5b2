"""What a study allows, and what it says where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.study.fake_runs import FakeArm
from zpp_lab.config.study import ArmConfig
from zpp_lab.runs.reader import read_study, write_study
from zpp_lab.tools.plan.search.limits import LossLimit, Numbers, read_limit

from .problems import ARMS, base, study

BLOCK = "recipe.grads.block_size=128"  # of the invented runs


@pytest.fixture
def limit(tmp_path: Path) -> LossLimit:
    return read_limit(study(tmp_path / "study"))


def ruling(limit: LossLimit, *words: str) -> tuple[str, str | None]:
    found = limit.rule(Numbers.of(base(*words)))
    return found.kind, found.arm


def test_only_what_was_measured_and_is_on_par(limit: LossLimit) -> None:
    assert limit.share == 0.01  # the study's own margin
    assert ruling(limit) == ("allowed", None)
    assert ruling(limit, "recipe=w4") == ("allowed", "w4")
    assert ruling(limit, "recipe=w4", "recipe.secondary=true") == ("allowed", "w4")
    assert ruling(limit, "recipe=w2") == ("loss", "w2")
    assert ruling(limit, "recipe=w2", "recipe.grads.bits=8") == ("loss", "w2")  # coarser
    for words in (["recipe=w8"], ["recipe=w4", "recipe.grads.bits=8"]):
        assert ruling(limit, *words) == ("not measured", None)
    assert ruling(limit, "recipe=w4_normal") == ("not measured", None)
    assert ruling(limit, "train.optimizer_state=8bit") == ("not measured", None)


def test_undecided_only_when_asked(tmp_path: Path, limit: LossLimit) -> None:
    words = ["recipe.grads.bits=4", BLOCK]
    assert ruling(limit, *words) == ("loss", "g4")
    wide = read_limit(tmp_path / "study", undecided=True)
    assert ruling(wide, *words) == ("allowed", "g4")
    assert "--allow undecided" in wide.rule(Numbers.of(base(*words))).why


def test_a_gap_that_the_limit_covers_is_on_par_though_it_is_real(tmp_path: Path) -> None:
    arms = (ARMS[0], FakeArm("w4", "", 0.04, 0.001, 4))  # 1.7 % of the baseline's loss
    folder = study(tmp_path / "study", arms)
    assert ruling(read_limit(folder), "recipe=w4")[0] == "loss"
    assert ruling(read_limit(folder, max_gap=0.03), "recipe=w4")[0] == "allowed"


def test_no_verdicts(tmp_path: Path) -> None:
    folder = study(tmp_path / "study", runs=False)
    with pytest.raises(ValueError, match="zpp-lab study fake --dir"):
        read_limit(folder)
    with pytest.raises(ValueError):
        read_limit(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="share of the baseline's loss"):
        read_limit(folder, max_gap=2)


def test_a_control_that_came_out_wrong_ends_it(tmp_path: Path) -> None:
    folder = study(tmp_path / "study")
    made = read_study(folder)
    assert made is not None
    arms = [
        replace(a, role="negative_control") if a.name == "w4" else a  # on par, though it must not
        for a in made.arms
    ]
    assert isinstance(arms[0], ArmConfig)
    write_study(folder, replace(made, arms=arms))
    with pytest.raises(ValueError, match="w4"):
        read_limit(folder)
