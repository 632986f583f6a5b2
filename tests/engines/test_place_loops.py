"""zpp_lab.shard with place, masters, optimizer_state and clip_by: user training loops have the bits
of our engine without placement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines.fsdp_world import run_world
from tests.engines.place_jobs import Place
from tests.engines.place_loop_jobs import (
    by_budget,
    by_unit,
    clipped_twice,
    dropped,
    every,
    looked_at,
    not_finite,
    refusals,
    resharded,
    scheduled,
    stopped,
    whole_states,
    written,
)

SOME: list[Place] = ["device", "host", {"masters": 1, "moments": 2}, {"gradients": 1}]
QUICK: dict[str, list[Place]] = {
    "split": SOME,
    "split_last": [{"gradients": 3}],
    "split_kept": ["host"],
    "8bit_states": ["host"],
}
TABLE = ("zeropp_every", "stage2", "memory_loco", "phases_memory", "split_differences")


def test_two_ranks_equal_the_engine() -> None:
    assert run_world(2, every, QUICK, 2) == {}


def test_one_rank() -> None:
    one: dict[str, list[Place]] = dict.fromkeys(("split_zero3", "split_fp32_states"), SOME)
    assert run_world(1, every, one | {"8bit_states": [{"moments": 1}]}, 1) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE)
def test_recipes(case: str) -> None:
    assert run_world(2, every, {case: SOME}, 2) == {}


def test_auto_takes_what_a_budget_leaves() -> None:
    outcome, place, too_large, unsaid = run_world(2, by_budget, 2)
    assert outcome == ""
    assert place["gradients"] == 3  # all units
    assert 0 < place["moments"] < 3
    assert "optimizer_state='8bit'" in too_large
    assert "gpu_gib" in unsaid


def test_clipped_by_unit() -> None:
    assert run_world(2, by_unit, ["split", "8bit_states"], 2) == {}
    assert run_world(1, by_unit, ["split_zero3"], 1) == {}


def test_a_schedule_changes_no_update_that_waits() -> None:
    assert run_world(2, scheduled) == ""


def test_loops_that_end_before_their_update(tmp_path: Path) -> None:
    assert run_world(2, stopped, str(tmp_path), 2) == [""] * 2
    assert run_world(1, resharded, str(tmp_path)) == ""


def test_whole_states_of_a_checkpoint() -> None:
    assert run_world(2, whole_states) == ""


def test_a_second_clipping_leaves_the_first() -> None:
    assert run_world(2, clipped_twice) == pytest.approx(0.25, rel=1e-5)


def test_whatever_looks_at_a_weight_finds_it_updated() -> None:
    assert run_world(2, looked_at) == {}


@pytest.mark.parametrize(
    "case", ["split_fp32_states", pytest.param("split_kept", marks=pytest.mark.slow)]
)
def test_weights_that_a_loop_writes_are_the_masters(case: str) -> None:
    assert run_world(2, written, case) == {}


def test_gradients_that_a_loop_drops_are_gone() -> None:
    assert run_world(2, dropped) == ""


def test_what_is_not_finite_changes_nothing() -> None:
    said = run_world(2, not_finite)
    assert len(said) == 3
    assert said == [said[0]] * 3
    assert re.fullmatch(r"NonFiniteError: step 2.*the gradient of .*further", said[0])


def test_what_does_not_go_together_is_named() -> None:
    named = {
        "other optimizer": r"sharded\.adamw",
        "forward first": r"sharded\.adamw",
        "graphed": "place",
        "clip": "clip_by='unit'",
        "no clip": "clip_by='unit'",
        "fp32": "masters=split",
        "param_dtype": "param_dtype=bf16",
        "budget": "gpu_gib",
        "misspelled": r"^ValueError: place='hots'.*auto",
        "gather": "gather='flatt'",
        "steps": "steps=0",
        "reduce_dtype": "reduce_dtype='fp64'",
        "seed": "seed=1.5",
        "timeout_seconds": "timeout_seconds=nan",
        "cluster": "nodes=0",
        "no place": "^ValueError: place=null",
        "no plane": r"(?s)^ValueError: place=.*moments",
        "rate": "-1.0",
        "unit's clip": "clip=-1.0",
        "flag": "place.moments=true",
        "misspelled key": "weight_deacy",
        "thawed": r"head.*sharded\.adamw",
        "no state": "optimizer_state",
        "bf16 masters": "head.*masters='split'",
        "more state": "low.*masters",
        "weights": "place.*weights",
        "torch's clipping": "clip_grad_norm_",
        "a look": r"sharded\.adamw",
        "limit": r"clip_grad_norm_\(-1",
        "NaN limit": r"clip_grad_norm_\(nan",
        "rate, later": "lr=nan",
        "rate below 0, later": "lr=-1.0",
        "state set": "load_state_dict",
        "clipped early": "clip_grad_norm_",
        "changed then": "head.*clip_grad_norm_",
        "torch's key": "maximize",
        "halved before": "param_dtype=",
        "halved then": "param_dtype=",
        "halved after": "param_dtype=",
        "backward then": "clip_grad_norm_",
        "twice": r"sharded\.adamw",
        "unit clips": "clip_by='unit'",
        "unit twice": "clip_by='unit'",
        "unit's rate": r"lr=0\.5.*clip_by='unit'",
        "unit's own gradient": r"clip_by='unit'.*head",
        "unit thawed": r"head.*sharded\.adamw",
    }
    found = run_world(1, refusals)
    assert {n: text for n, text in found.items() if not re.search(named[n], text)} == {}
    assert found.keys() == named.keys()
