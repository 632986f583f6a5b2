"""What DeepSpeed is told of a recipe, and what it is not asked to do. Needs no DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.deepspeed.settings import check_gradients, deepspeed_settings

ZEROPP = {"secondary": True, "hops": 2, "weights": {"bits": 8}, "grads": {"bits": 4}}


def config(recipe: dict[str, Any] | None = None, **groups: dict[str, Any]) -> Config:
    groups = {k: v for k, v in groups.items() if v}
    engine = {"name": "deepspeed", **groups.pop("engine", {})}
    cluster = groups.pop("cluster", {"nodes": 2, "gpus_per_node": 2})
    return load(Config, {"recipe": recipe or {}, "cluster": cluster, "engine": engine, **groups})


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"weights": {"bits": 4}}, "4 bits on weights_forward"),
        ({"weights": {"bits": 8, "block_size": 256}}, "block_size=256 on weights_forward"),
        ({"weights": {"bits": 8, "rounding": "stochastic"}}, "rounding=stochastic"),
        ({"weights": {"codec": "theirs"}}, "codec 'theirs'"),
        ({"weights_forward": {"bits": 8}}, r"recipe\.weights"),
        ({"hops": 1, "grads": {"bits": 4}}, "recipe.hops=1 with quantized gradients"),
        ({"hops": 2}, "recipe.hops=2 with raw gradients"),
        ({"stage": 2}, "recipe.stage=2"),
        ({"exempt": {"names": ["embed*"]}}, "recipe.exempt"),
        ({"rules": [{"name": "head*", "exempt": True}]}, "recipe.rules"),
        ({"hops": 2, "grads": {"bits": 4, "memory": {"kind": "residual"}}}, r"memory\.kind"),
    ],
)
def test_what_it_cannot_express_is_refused(recipe: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        deepspeed_settings(config(recipe))


@pytest.mark.parametrize(
    ("recipe", "groups", "said"),
    [
        (ZEROPP, {"cluster": {"nodes": 1, "gpus_per_node": 4}}, "on one node"),
        (
            {"secondary": True},
            {"cluster": {"nodes": 4, "gpus_per_node": 1}},
            "secondary=true with one GPU",
        ),
        ({}, {"train": {"accumulate": "last"}}, "accumulate=last"),
        ({}, {"engine": {"transport": "peer"}}, "engine.transport=peer"),
        ({}, {"engine": {"blocks_per_unit": 2}}, "leave engine.blocks_per_unit=1"),
    ],
)
def test_what_else_it_cannot_follow(
    recipe: dict[str, Any], groups: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        deepspeed_settings(config(recipe, **groups))


def test_gradients_that_it_would_not_quantize() -> None:
    shapes = {"norm": (7,), "good": (8, 16), "odd": (3, 5), "shared": (18, 4)}
    found = check_gradients(shapes, config(ZEROPP), visible=4)
    assert [f.split()[0] for f in found] == ["a", "odd", "shared"]
    assert "engine.emulate_nodes=true" in found[0]
    assert check_gradients({"good": (8, 16)}, config(ZEROPP), visible=2) == []
    assert check_gradients(shapes, config(), visible=4) == []
