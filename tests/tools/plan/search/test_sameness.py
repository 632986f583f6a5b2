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


@pytest.mark.parametrize(
    "words", [("recipe=w8",), ("recipe.grads.bits=8",), ("train.optimizer_state=8bit",)]
)
def test_what_changes_numbers_is_not(words: tuple[str, ...]) -> None:
    assert not numbers(*words).raw


def test_a_cluster_with_fewer_hops_is_covered_but_not_one_with_more() -> None:
    two, one = numbers("recipe=zeropp"), numbers("recipe=zeropp", "cluster=1x4")
    assert two.covers(one)
    assert not one.covers(two)
    skipped = numbers("recipe=zeropp", "recipe.grads.bits=null", "recipe.grads_inter.bits=4")
    assert not two.covers(skipped)  # a hop that is there and raw was not measured so
