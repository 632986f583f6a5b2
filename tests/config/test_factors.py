"""Arms written as a grid."""

from __future__ import annotations

from typing import Any

import pytest

from zpp_lab.config.factors import expand_arms
from zpp_lab.config.load import load
from zpp_lab.config.study import StudyConfig


def expand(**arm: Any) -> list[dict[str, Any]]:
    return expand_arms([{"name": "a", **arm}])


def test_a_grid_of_settings_is_one_arm_a_combination() -> None:
    factors = {"recipe.weights.bits": [8, 4], "recipe.grads.bits": [None, 2]}
    made = expand(name="w{weights.bits}g{grads.bits}", factors=factors, overrides=["recipe=base"])
    assert [arm["name"] for arm in made] == ["w8graw", "w8g2", "w4graw", "w4g2"]
    assert made[0]["overrides"] == [
        "recipe=base",
        "recipe.weights.bits=8",
        "recipe.grads.bits=null",
    ]
    assert made[3]["factors"] == {"recipe.weights.bits": 4, "recipe.grads.bits": 2}


def test_names_of_ones_own_bring_overrides_or_are_used_in_one() -> None:
    made = expand(
        name="{wire}_{bits}_{place}",
        describe="{bits} bits",
        against="zero3_{place}",
        overrides=["recipe.{wire}.bits={bits}"],
        factors={
            "wire": ["weights", "grads"],
            "bits": [4],
            "place": {"small": ["cluster=2x2", "recipe.{wire}.block_size=64"], "none": None},
        },
    )
    assert [arm["name"] for arm in made][:2] == ["weights_4_small", "weights_4_none"]
    assert made[2]["overrides"] == [
        "recipe.grads.bits=4",
        "cluster=2x2",
        "recipe.grads.block_size=64",
    ]
    assert (made[2]["describe"], made[2]["against"]) == ("4 bits", "zero3_small")


def test_expanding_what_is_expanded_changes_nothing() -> None:
    factors = {"model": {"1m": ["model=1m", "train.lr=1e-3"]}, "recipe.hops": [1, 2], "label": "x"}
    once = expand(name="{model}_{hops}", factors=factors)
    assert expand_arms(once) == once
    values = {"name": "s", "question": "?", "seeds": [1], "arms": once, "baseline": "1m_1"}
    assert load(StudyConfig, values).arms[1].factors["recipe.hops"] == 2


@pytest.mark.parametrize(
    ("arm", "answer"),
    [
        ({"factors": {"recipe.weights.bits": [8, 4]}}, "arm a: .*recipe\\.weights\\.bits"),
        ({"factors": {"bits": [8, 4]}}, "{bits}.*settings start with"),
        ({"factors": {"recpie.weights.bits": [8, 4]}}, "settings start with.*recipe"),
        ({"factors": {"recipe.weights.bits": []}}, "give a list of levels"),
        ({"factors": [4]}, "arm a: factors"),
        ({"name": "{bist}", "factors": {"recipe.weights.bits": [4]}}, "{bist} names 0 factors"),
        (
            {
                "name": "{bits}",
                "factors": {"recipe.weights.bits": [4], "recipe.grads.bits": [4]},
            },
            "{bits} names 2 factors",
        ),
    ],
)
def test_mistakes_are_answered(arm: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        expand(**arm)
