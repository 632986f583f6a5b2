"""What the search looks at: valid, each once, and no part of a recipe left out."""

from __future__ import annotations

import pytest

from zpp_lab.config.schema import RecipeConfig
from zpp_lab.tools.plan.search.space import Space, runs, without_name

from .problems import base


def recipes(*overrides: str, studied: bool = False) -> list[RecipeConfig]:
    return Space(base(*overrides), studied=studied).recipes()


@pytest.mark.slow
def test_every_recipe_runs_and_comes_once() -> None:
    found = recipes(studied=True)
    assert len(found) > 2000
    assert len({without_name(r) for r in found[::10]}) == len(found[::10])
    assert len({r.name for r in found}) == len(found)
    assert all(runs(r, base()) for r in found[::50])


def test_one_node_has_one_hop_and_one_rank_has_no_wires() -> None:
    assert {r.hops for r in recipes("cluster=1x4")} == {1}
    assert {r.shard for r in recipes("cluster=1x4")} == {"world"}
    alone = recipes("cluster.nodes=1", "cluster.gpus_per_node=1")
    assert [r.name for r in alone] == ["zero3"]
