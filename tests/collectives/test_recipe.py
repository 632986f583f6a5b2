"""Recipes: inheritance, exemptions, rules, and every contradiction is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zpp_lab.codecs import BlockCodec, RawCodec
from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.recipe import twin
from zpp_lab.config.schema import ClusterConfig, RecipeConfig

MATRIX = Parameter("layers.0.mlp.up.weight", (64, 32), 4)
BIAS = Parameter("layers.0.mlp.up.bias", (64,), 4)
EMBED = Parameter("embed.weight", (256, 32), 4)


def recipe(nodes: int = 2, local: int = 2, **values: object) -> Recipe:
    config = load(RecipeConfig, {"name": "case", **values})
    return Recipe(config, ClusterConfig(nodes=nodes, gpus_per_node=local))


def test_wires_inherit_from_their_short_hand() -> None:
    made = recipe(hops=2, grads={"bits": 8, "block_size": 64}, grads_inter={"bits": 4})
    assert made.codec("grads_intra", MATRIX) == BlockCodec(8, 64)
    assert made.codec("grads_inter", MATRIX) == BlockCodec(4, 64)
    assert made.codec("weights_forward", MATRIX) == RawCodec(torch.float32)


def test_norms_and_biases_are_exempt_and_rules_win() -> None:
    made = recipe(
        weights={"bits": 8},
        rules=[
            {"name": "embed*", "exempt": True},
            {"name": "*.bias", "wires": ["weights_forward"], "set": {"bits": 2}},
        ],
    )
    assert isinstance(made.codec("weights_backward", BIAS), RawCodec)
    assert made.codec("weights_forward", BIAS) == BlockCodec(2)
    assert isinstance(made.codec("weights_forward", EMBED), RawCodec)
    assert made.codec("weights_forward", MATRIX) == BlockCodec(8)


def test_exempt_by_name_and_size() -> None:
    made = recipe(weights={"bits": 4}, exempt={"names": ["embed*"], "below_numel": 4000})
    assert isinstance(made.codec("weights_forward", EMBED), RawCodec)
    assert isinstance(made.codec("weights_forward", MATRIX), RawCodec)


@pytest.mark.parametrize(
    ("nodes", "local", "hops"),
    [
        (2, 2, ("grads_intra", "grads_inter")),
        (1, 4, ("grads_intra",)),
        (4, 1, ("grads_inter",)),
        (1, 1, ()),
    ],
)
def test_a_hop_with_one_participant_does_not_exist(nodes: int, local: int, hops: tuple) -> None:
    assert recipe(nodes, local, hops=2).hops == hops


@pytest.mark.parametrize(
    ("cluster", "values", "fix"),
    [
        ((2, 2), {"grads_inter": {"bits": 4}}, "recipe.hops=2"),
        ((1, 1), {"weights": {"bits": 4}}, "recipe=zero3"),
        ((1, 4), {"hops": 2, "grads_inter": {"bits": 4}}, "would carry nothing"),
        ((2, 2), {"secondary": True, "weights_backward": {"bits": 4}}, "weights_forward"),
        ((2, 2), {"stage": 2, "weights_backward": {"bits": 4}}, "weights_forward"),
        ((2, 2), {"stage": 2, "secondary": True}, "recipe.stage=3"),
        ((2, 2), {"weights": {"bits": 5}}, "bits=5"),
        ((2, 2), {"weights": {"codec": "magic"}}, r"names: block, .*normal"),
    ],
)
def test_contradictions_name_the_fix(cluster: tuple, values: dict, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        recipe(*cluster, **values)


DIFF = ["recipe=g8_4_hadamard", "recipe.sharding.weights=node", "recipe.weights_update.bits=4"]
DIFF += ["recipe.sharding.update=differences"]


@pytest.mark.parametrize(
    ("words", "raw"),
    [
        (DIFF, ["recipe=amsp_node"]),
        (["recipe=diff2_g82"], ["recipe=amsp_node"]),
        (["recipe=zeropp"], ["recipe=zero3", "recipe.secondary=true", "recipe.hops=2"]),
        (["recipe=sham_w4"], ["recipe=zero3", "recipe.secondary=true"]),
        (["recipe=w8", "recipe.shard=node"], ["recipe=zero3", "recipe.shard=node"]),
        (["recipe=w8_then_w4"], ["recipe=zero3"]),
    ],
)
def test_a_raw_twin_has_the_same_partition_and_no_codec(words: list[str], raw: list[str]) -> None:
    own, wanted = compose(words).recipe, compose(raw).recipe
    found = twin(own)
    assert replace(found, name=wanted.name) == wanted
    assert (own.coded, found.coded) == (True, False)
    assert twin(found) == replace(found, name=f"{found.name}_raw")


def test_plain_is_what_fsdp2_does_by_itself() -> None:
    words = ["zero3", "amsp_node", "zeropp", "w8", "zero3_reordered"]
    assert [w for w in words if compose([f"recipe={w}"]).recipe.plain] == ["zero3"]
    for more in ("recipe.shard=node", "recipe.secondary=true", "recipe.stage=2"):
        assert compose(["recipe=zero3", more]).recipe.plain
