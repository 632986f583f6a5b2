"""Which plans train alike, and which are coarser."""

from __future__ import annotations

import pytest

from zpp_lab.tools.plan.search.limits import Numbers

from .problems import base


def numbers(*overrides: str) -> Numbers:
    return Numbers.of(base(*overrides))


@pytest.mark.parametrize(
    "words",
    [
        ("recipe.stage=2",),
        ("recipe.shard=node",),
        ("recipe.hops=2",),
        ("recipe.secondary=true",),
        ("model.checkpoint_activations=true", "model.loss_chunk=512"),
        ("train.micro_steps=4", "train.accumulate=last"),
        ("recipe.exempt.names=[embed*]",),
    ],
)
def test_what_only_moves_numbers_is_plain(words: tuple[str, ...]) -> None:
    assert numbers(*words).raw


def test_kept_weights_are_those_of_another_gather() -> None:
    assert numbers("recipe=w8").covers(numbers("recipe=w8", "recipe.secondary=true"))
    assert numbers("recipe=w8").covers(numbers("recipe=w8", "recipe.stage=2"))
    drawn = "recipe.weights.rounding=stochastic"
    assert not numbers("recipe=w8", drawn).covers(numbers("recipe=w8", drawn, "recipe.stage=2"))


def test_blocks_rotations_hops_and_exemptions_count() -> None:
    four = numbers("recipe.grads.bits=4")
    for word in ("grads.block_size=64", "grads.hadamard=64", "hops=2", "exempt.max_ndim=0"):
        assert not four.covers(numbers("recipe.grads.bits=4", f"recipe.{word}")), word
    assert four.covers(numbers("recipe.grads.bits=4", "recipe.grads.block_size=256"))


def test_coarser() -> None:
    two = numbers("recipe=w2")
    assert numbers("recipe=w2", "recipe.grads.bits=4").coarser(two)
    assert numbers("recipe=w2", "train.optimizer_state=8bit").coarser(two)
    assert not numbers("recipe=w4").coarser(two)
    assert two.coarser(numbers("recipe=w4"))
    assert not numbers("recipe=w2", "recipe.weights.hadamard=64").coarser(two)
    hop = numbers("recipe.grads.bits=2")
    assert numbers("recipe.grads.bits=2", "recipe.hops=2").coarser(hop)
