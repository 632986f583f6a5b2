"""The table of wires: what hangs on it, and that a wire is one row."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest
import torch

from zpp_lab.codecs import noise_key
from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import Plan, Unit
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.compose import compose
from zpp_lab.config.flat import arm_name, every_setting
from zpp_lab.config.recipe import PhaseConfig, RecipeConfig
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.config.wires import SHORTS, WIRES, Wire, WireSpec, wires_among
from zpp_lab.runs.checkpoint.origin import settings_digest
from zpp_lab.runs.wandb.identity import codec_labels, tags

RULED = (
    "recipe.rules=[{ndim: 2, set: {bits: 3}}, {name: 'a*', wires: [grads_inter], exempt: true}]",
    "recipe.phases=[{after: 0.5, rules: [{min_numel: 9, exempt: true}]}]",
)


def test_every_wire_has_a_row_and_the_number_that_its_noise_had() -> None:
    assert get_args(Wire) == tuple(WIRES)
    assert [spec.number for spec in WIRES.values()] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12]


def test_wires_with_codecs_have_settings() -> None:
    wanted = {*SHORTS, *(wire for wire, spec in WIRES.items() if spec.codecs != "none")}
    always = {
        "weights_rollout",
        "acts",
        "acts_forward",
        "acts_backward",
        "acts_pipe",
    }  # in every phase
    for cls, missing in ((RecipeConfig, set()), (PhaseConfig, always)):
        found = {f.name for f in fields(cls) if "CodecConfig" in str(f.type)}
        assert found == wanted - missing


def test_what_needs_a_property_is_there_with_it() -> None:
    assert RecipeConfig().wires == wires_among()
    for wire, spec in WIRES.items():
        assert bool(spec.needs) == bool(spec.brought_by)
        for setting in spec.brought_by:
            words = [setting, *(["recipe.stage=2"] if "update" in setting else [])]
            words += [f"cluster.{'pp' if 'pipe' in wire else 'tp'}=2"] if "acts" in setting else []
            assert wire in compose(words).recipe.wires


def test_rules_for_every_wire_leave_names_and_digests_as_they_were() -> None:
    """So a run with rules, from before they could be for wires to come, goes on."""
    config = compose(["recipe=w4", *RULED, "train.steps=10"])
    rules = "[*:3~cdee5da6,a*:raw~9c1a33fb]"
    assert arm_name(config) == f"w4 phases=[0.5:rules=[*:raw~9f143ccf]] rules={rules}"
    assert settings_digest(config) == (
        "cb717e7a38f072ec28d13f97ce1d372547c7e861f346aef4286568834a9de348"
    )


def test_a_wire_more_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes, plans, ledgers, noise, records and tags have it."""
    before = settings_digest(compose(["recipe=w4", *RULED, "train.steps=10"]))
    row = WireSpec(99, "gradients", "reduce", "hop", tag="dummy")
    monkeypatch.setitem(WIRES, "dummy", row)  # type: ignore[misc]
    config = compose(["recipe=w4", *RULED, "train.steps=10"])
    assert settings_digest(config) == before
    assert config.recipe.wires[-1] == "dummy"
    assert all(rule.holds_on("dummy") for rule in config.recipe.rules[:1])  # type: ignore[arg-type]
    recorded = every_setting(Config())
    assert recorded["wires"]["dummy"] == {"codec": "none"}
    assert codec_labels(recorded)["dummy"] == "raw"  # type: ignore[index]
    assert "weights=raw" in tags(recorded)
    recipe = Recipe(RecipeConfig(), ClusterConfig(2, 2))
    parameter = Parameter("a", (8, 8), recipe.shards)
    plan = Plan.build([Unit("", (parameter,), frozenset({"a"}))], recipe)
    assert (
        set(plan.step_bytes())
        == set(Ledger().step)
        == {*WIRES}
        - {
            "weights_update",
            "weights_rollout",
            "acts_forward",
            "acts_backward",
            "acts_pipe",
            "tp_raw",
        }
    )
    assert recipe.codec("dummy", parameter).dtype == torch.float32  # type: ignore[arg-type, attr-defined]
    keys = {noise_key(0, 0, 0, wire) for wire in WIRES}
    assert len(keys) == len(WIRES)
