"""The learning rate step by step, and beta2 given in tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.small_runs import small
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import ClusterConfig, Config, TrainConfig
from zpp_lab.engines.optim.build import adamw, learning_rate


def rates(schedule: Any, **settings: Any) -> list[float]:
    train = TrainConfig(steps=10, warmup_steps=2, lr=1.0, schedule=schedule, **settings)
    return [learning_rate(step, train) for step in range(train.steps)]


def test_each_schedule_by_hand() -> None:
    up = [0.5, 1.0]
    assert rates("constant") == [*up, *[1.0] * 8]
    fall = [1 - i / 8 for i in range(8)]
    assert rates("linear", min_lr_ratio=0) == [*up, *fall]
    assert rates("linear", min_lr_ratio=0.5) == pytest.approx([*up, *(0.5 + x / 2 for x in fall)])
    assert rates("wsd", min_lr_ratio=0, decay_steps=4) == [*up, *[1.0] * 4, 1.0, 0.75, 0.5, 0.25]
    assert rates("wsd", min_lr_ratio=0) == [*up, *[1.0] * 6, 1.0, 0.5], "a fifth of all steps"
    half = rates("cosine", min_lr_ratio=0)
    assert half[6] == pytest.approx(0.5)
    assert half[2:] == sorted(half[2:], reverse=True)


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_a_decay_from_the_warm_up_on_is_linear(low: float) -> None:
    assert rates("wsd", min_lr_ratio=low, decay_steps=8) == rates("linear", min_lr_ratio=low)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("schedule=wsd decay_steps=11", r"decays over 11 .*warmup_steps=2 leave 10: set a shorter"),
        ("schedule=wsd decay_steps=3 decay_share=0.5", r"decay_steps.*decay_share"),
        ("schedule=wsd decay_share=0", "decay_share"),
        ("decay_steps=3", "train.schedule=wsd"),
        ("beta2_tokens=0", "beta2_tokens"),
        ("beta2_tokens=1000 beta2=0.9", "both set beta2"),
        ("beta2_tokens=1e30", "beta2 would round to 1; use fewer"),
    ],
)
def test_contradictions_are_refused(settings: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        small(tmp_path, *(f"train.{word}" for word in settings.split()))


def beta2(config: Config) -> float:
    optimizer = adamw({"p": nn.Parameter(torch.zeros(3))}, config.optimization)
    return float(optimizer.param_groups[0]["betas"][1])


def test_a_half_life_in_tokens() -> None:
    """After that many tokens a gradient's square counts half as much, whatever the batch."""
    base = ["data.seq_len=64", "train.batch_size=2", "train.micro_steps=3", "cluster=2x2"]
    config = compose([*base, "train.beta2_tokens=15360"])
    assert config.tokens_per_step == 2 * 3 * 64 * 4
    assert beta2(config) ** 10 == pytest.approx(0.5)
    twice = compose([*base, "train.beta2_tokens=15360", "train.micro_steps=6"])
    assert beta2(twice) == pytest.approx(beta2(config) ** 2)
    assert beta2(Config(cluster=ClusterConfig(1, 1))) == 0.95
    assert beta2(compose(["train.beta2=0.99", "train.beta2_tokens=null"])) == 0.99
