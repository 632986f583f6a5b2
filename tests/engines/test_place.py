"""engine.place: bits do not depend on where training state lies, or on when a unit is updated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines import place_world
from tests.engines.fsdp_world import run_world
from tests.engines.place_jobs import (
    PAIRWISE,
    Place,
    adapters,
    alone,
    every,
    from_meta,
    not_finite,
    stopped,
    unused,
)
from tests.two_ranks import COUNT, answers_of, four_gpus, two_ranks
from zpp_lab.config.compose import compose
from zpp_lab.config.residence import EVERY, Residence

SOME: list[Place] = [
    "host",
    {"masters": 1, "moments": 2, "weights": 3},
    {"gradients": 2, "moments": 1, "weights": 2},
]
WITHOUT_PLANES: list[Place] = ["host", {"moments": 2}, {"gradients": 1}]
QUICK: dict[str, list[Place]] = {
    "split": SOME,
    "split_zero3": ["host", {"weights": 3}],
    "split_last": [{"gradients": 3, "weights": 1}],
    "split_kept": ["host", {"weights": 2, "moments": 1}],
    "8bit_states": ["host"],
    "bf16_states": WITHOUT_PLANES[1:],
}
# partitions, phases, residuals, replicated weights, random rounding, accumulation
TABLE = (
    *("zeropp_every", "zeropp_last", "stage2", "stochastic_secondary", "hadamard_left"),
    *("memory_first", "phases_memory", "differences_drawn", "kept_other_bits", "everything"),
    *("grid_none_none_node", "zero3_bf16_reduce"),
)


def test_quick_placements_equal_the_virtual_engine() -> None:
    assert run_world(2, every, QUICK, 2, 1) == {}


def test_one_rank() -> None:
    assert run_world(1, alone, ["split_zero3", "split_fp32_states", "8bit_states"]) == {}


def test_a_run_that_ends_before_its_update(tmp_path: Path) -> None:
    assert run_world(2, stopped, str(tmp_path)) == [""] * 6


def test_what_is_not_finite_is_named_and_changes_nothing() -> None:
    device, *others = run_world(2, not_finite, "split")
    assert "layers.1.up.weight" in device
    assert others == [device] * 3


def test_units_that_a_step_does_not_run() -> None:
    assert run_world(2, unused) == ""


def test_adapters_on_a_frozen_base() -> None:
    assert run_world(2, adapters) == ""


def test_a_model_that_starts_without_memory() -> None:
    assert run_world(2, from_meta) == ""


@pytest.mark.slow
def test_every_pair_of_counts() -> None:
    assert len(PAIRWISE) == 16
    assert run_world(4, every, {"split": PAIRWISE}, 2, 2) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE)
def test_recipes(case: str) -> None:
    assert run_world(4, every, {case: SOME}, 2, 2) == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(1, marks=pytest.mark.skipif(COUNT == 0, reason="needs a GPU")),
        pytest.param(2, marks=two_ranks),
        pytest.param(4, marks=four_gpus),
    ],
)
def test_gpus(world: int, tmp_path: Path) -> None:
    """With updates that are held up; on one GPU and on two, not waiting for them shows."""
    found = answers_of("tests.engines.place_world", tmp_path, 800, world)
    wanted: dict[str, str | bool] = dict.fromkeys(place_world.names(world), "")
    wanted |= {name: True for name in wanted if re.search("by the host|without a wait", name)}
    assert {n: found.get(n, "missing") for n in wanted} == wanted, found["output"]


def test_residence_of_the_settings() -> None:
    def of(*words: str) -> Residence:
        return Residence.of(compose(["engine=fsdp", "train.param_dtype=bf16", *words]))

    split = "train.masters=split"
    assert of() == Residence()
    assert of("engine.offload=true").offloads
    eight = of("train.optimizer_state=8bit", "train.optimizer_place=host")
    assert (eight.moments, eight.waits, eight.passes) == (EVERY, False, True)
    assert of(split, "engine.place=host") == Residence(EVERY, EVERY, EVERY, waits=True)
    some = of(split, "engine.place={masters: 2, moments: 1}")
    assert some == Residence(2, 1, 0, waits=True)
    none = range(3, 3)
    far = {"masters": range(1, 3), "moments": range(2, 3), "gradients": none, "weights": none}
    assert some.far(4) == far
    assert of(split, "engine.place={weights: 1}") == Residence(weights=1, waits=True)
    unit = of(split, "engine.place={weights: 1}", "train.clip_by=unit")
    assert unit == Residence(weights=1, by_unit=True)
    assert Residence(moments=4).far(4)["moments"] == range(0, 4)
    assert not of(split, "engine.place=host", "recipe=w4_diff", "cluster=2x2").waits


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["engine.place=host"], "train.masters=split"),
        (["engine.place={masters: 1}", "train.optimizer_state=8bit"], "train.masters=split"),
        (["engine.place=host", "train.masters=split", "engine.offload=true"], "engine.offload"),
        (
            ["engine.place=host", "train.optimizer_state=8bit", "train.optimizer_place=host"],
            "train.optimizer_place",
        ),
        (["engine.place={weights: 1}", "train.optimizer_state=8bit"], "train.masters=split"),
        (["engine.place={activations: 1}", "train.masters=split"], "engine.place"),
        (["engine.place=host", "train.masters=split", "cluster.tp=2"], r"cluster\.tp"),
    ],
)
def test_what_cannot_be_placed_is_named(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compose(["engine=fsdp", "train.param_dtype=bf16", *words])
