"""The axes of a cluster, and every entry with one whose processes outnumber a cell's ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.cluster import CELL, ClusterConfig
from zpp_lab.config.compose import compose
from zpp_lab.config.flat import every_setting, stored_config
from zpp_lab.config.recipe import RecipeConfig
from zpp_lab.config.schema import Config
from zpp_lab.data.source import TextSource
from zpp_lab.data.tokens import TokenData
from zpp_lab.engines.build import build_engine, build_plan, check_engine, plan_of, vocabulary
from zpp_lab.models import build_model
from zpp_lab.study.run.places import gpus_needed
from zpp_lab.tools.plan.law import extent
from zpp_lab.train.launch.gpus import place
from zpp_lab.train.memory.outlook import Outlook
from zpp_lab.train.speed import step_flops

SHAPES = [(1, 2, 2, 1), (2, 4, 2, 2), (2, 4, 2, 1), (4, 2, 1, 2), (1, 8, 2, 2), (3, 4, 2, 2)]
TP = ["cluster.nodes=1", "cluster.gpus_per_node=4", "cluster.tp=2"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cells_partition_the_processes(shape: tuple[int, ...]) -> None:
    cluster = ClusterConfig(*shape)
    assert cluster.readers * cluster.tp * cluster.pp == cluster.world
    assert cluster.dp.dp == cluster.dp
    assert cluster.dp.tp == cluster.dp.pp == 1
    for axes, size in ((CELL, cluster.readers), ({"tp"}, cluster.tp), ({"pp"}, cluster.pp)):
        groups = {tuple(cluster.members(axes, rank)) for rank in range(cluster.world)}
        assert sorted(r for group in groups for r in group) == list(range(cluster.world))
        assert {len(group) for group in groups} == {size}
    for rank in range(cluster.world):
        parts = cluster.members({"tp"}, rank)
        assert parts == list(range(parts[0], parts[0] + cluster.tp))  # the fastest axis
        node = cluster.members({"gpu", "tp"}, rank)
        assert len({r // cluster.gpus_per_node for r in node}) == 1
        cell = cluster.members(CELL, rank)
        own, dp = cell.index(rank), cluster.dp
        for axes in ({"gpu"}, {"node"}):
            assert cluster.members(axes, rank) == [cell[i] for i in dp.members(axes, own)]


def test_a_plain_cluster_is_its_own_cell() -> None:
    cluster = ClusterConfig(2, 3)
    assert cluster.dp is cluster
    assert cluster.readers == cluster.world == 6
    assert cluster.members(CELL, 4) == [0, 1, 2, 3, 4, 5]
    assert cluster.members({"gpu"}, 4) == [3, 4, 5]
    assert cluster.members({"node"}, 4) == [1, 4]


@pytest.mark.parametrize(
    ("shape", "name"), [((1, 3, 2, 1), "cluster.tp"), ((3, 4, 2, 4), "cluster.pp")], ids=str
)
def test_axes_that_do_not_divide_are_refused(shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ClusterConfig(*shape)


def test_files_name_tp_and_pp_only_where_they_are_not_1() -> None:
    plain, parts = compose([]), compose(TP)
    assert set(every_setting(plain)["cluster"]) == {"nodes", "gpus_per_node"}
    stored = every_setting(parts)
    assert stored["cluster"] == {"nodes": 1, "gpus_per_node": 4, "tp": 2}
    for config in (plain, parts):
        again = stored_config(yaml.safe_load(yaml.safe_dump(every_setting(config))))
        assert again.cluster == config.cluster


def test_a_recipe_knows_one_cell() -> None:
    cluster = ClusterConfig(1, 4, tp=2)
    with pytest.raises(AssertionError):
        Recipe(RecipeConfig(), cluster)
    assert Recipe.of(Config(cluster=cluster)).cluster == ClusterConfig(1, 2)


def test_readers_count_batches_and_processes_count_gpus() -> None:
    """Each entry that multiplies by ranks, with four processes of two readers."""
    parts = compose([*TP, "engine=fsdp", "train.batch_size=2"])
    plain = replace(parts, cluster=ClusterConfig(1, 2))
    assert parts.tokens_per_step == plain.tokens_per_step
    source = cast(TokenData, SimpleNamespace(turns=lambda seed, step, *shape: shape))
    assert TextSource(parts, source).turns(0) == TextSource(plain, source).turns(0)
    plan, flops = plan_of(plain), set()
    assert extent(parts, plan) == extent(plain, plan)
    vocab = vocabulary(plain)
    for axes in ({}, {"tp": 2}, {"pp": 2}):
        own = compose(["recipe.stage=2", "train.micro_steps=2"])
        own = replace(own, cluster=ClusterConfig(1, 4 if axes else 2, **axes))
        flops.add(step_flops(plan_of(own), own, vocab))
    assert len(flops) == 1
    micro = "train.micro_steps=${micro_steps:4096}"
    assert compose([*TP, micro]).tokens_per_step == 4096
    assert place(parts.cluster, list("0123")).cluster.world == 4
    assert gpus_needed(parts) == 2 * gpus_needed(plain) == 4


def _engine(config: Config) -> object:
    return build_engine(config, vocabulary(config), torch.device("cpu"))


def _plan(config: Config) -> Plan:
    return build_plan(build_model(config.model, 256, "meta"), config)


ENTRIES: dict[str, Callable[[Config], Any]] = {
    "engine": _engine,
    "check": check_engine,
    "plan": plan_of,
    "model": _plan,
    "planner": lambda config: Outlook.of(config, 2**36),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("engine", "axis"),
    [("virtual", "pp"), ("fsdp", "pp"), ("deepspeed", "pp"), ("deepspeed", "tp")],  # with stage 3
)
def test_what_is_not_built_is_refused_by_name(entry: str, engine: str, axis: str) -> None:
    config = replace(compose([f"engine={engine}"]), cluster=ClusterConfig(2, 4, **{axis: 2}))
    with pytest.raises(ValueError, match=rf"cluster\.{axis}=2"):
        ENTRIES[entry](config)
