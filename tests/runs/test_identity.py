"""What wandb's stock pages show of a run: group, job type, tags and config."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.config.compose import compose
from zpp_lab.config.flat import arm_name, every_setting
from zpp_lab.config.recipe import POINTS, SHARDED, Parts
from zpp_lab.config.schema import Config, RecipeConfig, ShardingConfig
from zpp_lab.runs.wandb.folder import RunFolder
from zpp_lab.runs.wandb.identity import identity, shown_config, tags


def config(*overrides: str) -> dict[str, Any]:
    return asdict(compose(list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["recipe=zeropp", "cluster=4x8"], {"weights=8", "grads=4", "cluster=4x8"}),
        (["recipe=g8_4_hadamard"], {"weights=raw", "grads=8+4", "engine=virtual"}),
        (["recipe=w4", "recipe.rules=[{exempt:true}]"], {"weights=raw", "grads=raw"}),
        (
            ["recipe=w4", "recipe.rules=[{name:'embed*',wires:[weights_forward],set:{bits:8}}]"],
            {"weights=4/8+4", "grads=raw"},
        ),
        (
            [
                "recipe.rules=[{ndim:2,set:{codec:lattice}},{min_numel:9,wires:[grads_inter],exempt:true}]"
            ],
            {"weights=raw/lattice", "grads=raw/lattice"},
        ),
    ],
)
def test_tags_name_recipe_bits_cluster_and_engine(overrides: list[str], found: set[str]) -> None:
    got = tags(config(*overrides))
    assert found <= set(got)
    assert [tag.split("=")[0] for tag in got] == ["recipe", "weights", "grads", "cluster", "engine"]


@pytest.mark.parametrize(
    ("point", "update"),
    [
        *((point, "weights") for point in POINTS),
        *((p, "differences") for p in POINTS if p[2] == "world" != p[0]),
    ],
)
def test_wires_are_the_recipes(point: Parts, update: str) -> None:
    parts = dict(zip(SHARDED, point, strict=True))
    recipe = RecipeConfig(hops=2, sharding=ShardingConfig(update=update, **parts))
    assert set(shown_config(asdict(Config(recipe=recipe)))["wires"]) == set(recipe.wires)


@pytest.mark.parametrize(
    "words",
    [
        ["recipe.stage=2", "recipe.sharding.update=differences"],
        ["recipe.shard=node"],
    ],
)
def test_short_hands_of_sharding_have_their_wires(words: list[str]) -> None:
    composed = compose(words)
    assert set(shown_config(asdict(composed))["wires"]) == set(composed.recipe.wires)


def test_what_config_yaml_records_of_wires_is_shown_in_words() -> None:
    """As of a folder without the record."""
    words = ["recipe=w8_then_w4", "train.steps=100", "recipe.rules=[{ndim: 2, set: {bits: 3}}]"]
    for overrides in (words, ["recipe=w4_diff", "cluster=2x2"], ["recipe=tagc_topk"]):
        composed = compose(overrides)
        recorded = every_setting(composed)
        settings = asdict(composed) | {"cluster": composed.cluster.stored}
        assert shown_config(recorded) == shown_config(settings)
        assert tags(recorded) == tags(settings)
    assert shown_config(every_setting(compose(words)))["wires"]["weights_forward"] == "8/3>4/3"


def test_tags_name_tensor_parts_and_the_bits_between_them() -> None:
    shape = ["cluster=1x4", "cluster.tp=2", "cluster.pp=2"]
    assert "cluster=1x4 tp2 pp2" in tags(every_setting(compose(shape)))
    found = tags(every_setting(compose([*shape, "recipe.acts.bits=8"])))
    assert any(tag.startswith("acts=8") for tag in found)
    assert "cluster=2x2" in tags(every_setting(compose(["cluster=2x2"])))


def test_the_jobs_of_a_sweep_share_its_folders_name(tmp_path: Path) -> None:
    folder = tmp_path / "sweep-1" / "bits=4" / "seed1"
    folder.mkdir(parents=True)
    named = identity(RunFolder(folder), config(f"run.dir={tmp_path}", "run.name=four"))
    assert (named["group"], named["name"]) == ("sweep-1", "four")
    plain = identity(RunFolder(folder), config())
    assert (plain["group"], plain["name"]) == (None, "zero3 seed1")


def test_settings_come_before_wandbs_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(*overrides: str) -> tuple[str, list[str]]:
        found = identity(RunFolder(tmp_path), config(*overrides))
        return found["project"], [tag for tag in found["tags"] if "=" not in tag]

    assert named() == ("zpp_lab", [])
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_TAGS", "one, two,")
    assert named() == ("theirs", ["one", "two"])
    assert named("tracking.project=zpp_lab", "tracking.tags=[a]") == ("zpp_lab", ["a"])
    RunFolder(tmp_path).note(project="sent_before")  # a run stays where its steps are
    assert named()[0] == "sent_before"


@pytest.mark.parametrize(
    ("overrides", "arm"),
    [
        (["recipe=zero3"], "zero3"),
        (["recipe=zero3", "recipe.weights.bits=4"], "zero3 weights.bits=4"),
        (["recipe=w4", "recipe.weights.bits=null"], "w4 weights.bits=null"),
        (["recipe=base", "recipe.name=mine", "recipe.weights.bits=2"], "mine"),
        (
            ["recipe.rules=[{set:{codec:lattice}},{name:n,exempt:true}]"],
            "zero3 rules=[*:lattice,n:raw]",
        ),
    ],
)
def test_a_plain_run_is_called_by_the_recipe_that_it_really_has(
    overrides: list[str], arm: str, tmp_path: Path
) -> None:
    named = identity(RunFolder(tmp_path), config(*overrides, "seed=2"))
    assert (named["job_type"], named["name"]) == (arm, f"{arm} seed2")
    assert f"recipe={arm}" in named["tags"]


def test_long_names_are_cut_and_stay_apart() -> None:
    def told(wire: str, bits: int) -> tuple[str, str]:
        set_ = f"{{bits:{bits},block_size:64}}"
        rules = ",".join(f"{{name:blocks.{i}.*,wires:[{wire}],set:{set_}}}" for i in range(12))
        settings = config(f"recipe.rules=[{rules}]")
        (tag,) = (tag for tag in tags(settings) if tag.startswith("recipe="))
        return arm_name(settings), tag

    both = [told(wire, bits) for wire in ("weights_forward", "grads_intra") for bits in (2, 4)]
    names, cut = map(set, zip(*both, strict=True))
    assert (len(names), len(cut)) == (4, 4)
    for name in names:
        assert len(name) <= 100
        assert name.startswith("zero3 rules=[blocks.0.*:")
        assert all("=" in word for word in name.split(" ")[1:])  # as a sweep's
    for tag in cut:
        assert len(tag) <= 64
        assert tag.startswith("recipe=zero3 rules=[blocks.0.*:")
