"""The rule for a loss that is finite and lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.small_runs import small
from zpp_lab.config.schema import TrainConfig
from zpp_lab.train.evaluation import DivergedError, DivergenceRule
from zpp_lab.train.trainer import run

TRAIN = TrainConfig(diverge_above=1.0, diverge_steps=5)


def end(losses: list[float], rule: DivergenceRule, first: int = 1) -> int | None:
    """The step at which the rule ends the run."""
    for step, loss in enumerate(losses, first):
        try:
            rule.look(step, loss)
        except DivergedError:
            return step
    return None


def test_a_loss_that_stays_far_above_its_best_ends_the_run() -> None:
    losses = [5.0] * 10 + [2.0] * 30 + [3.5] * 10
    assert end(losses, DivergenceRule(TRAIN)) == 45
    rule = DivergenceRule(TRAIN, losses[:44])
    with pytest.raises(DivergedError, match=r"step 45: .*3\.5.*2\.000"):
        rule.look(45, 3.5)


def test_spikes_slow_learning_and_zero_do_not() -> None:
    spikes = ([2.0] * 20 + [9.0] * 4) * 10
    assert end(spikes, DivergenceRule(TRAIN)) is None
    assert end([5.5] * 500, DivergenceRule(TRAIN)) is None  # learns nothing: worse, not diverged
    lost = [2.0] * 20 + [9.0] * 100
    off = TrainConfig(diverge_above=0, diverge_steps=5)
    assert end(lost, DivergenceRule(off)) is None


@pytest.mark.parametrize("cut", [0, 7, 25, 41, 43])
def test_a_resumed_run_ends_at_the_same_step(cut: int) -> None:
    losses = [5.0] * 10 + [2.0] * 30 + [3.5] * 10
    assert end(losses[cut:], DivergenceRule(TRAIN, losses[:cut]), cut + 1) == 45


def test_a_run_whose_loss_runs_away_is_diverged(tmp_path: Path) -> None:
    settings = ["train.lr=8", "train.warmup_steps=1000", "train.steps=150", "train.eval_every=150"]
    rule = ["train.diverge_above=0.5", "train.diverge_steps=10", "train.checkpoint_every=0"]
    with pytest.raises(DivergedError):
        run(small(tmp_path, *settings, *rule))
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["outcome"] == "diverged"
    assert failure["step"] < 150
