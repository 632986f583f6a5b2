"""Recipes in phases: each step runs under the settings of its phase and no other, in both engines,
and a run that is stopped beside a border goes on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.fsdp_parity import PHASED, configured
from tests.engines.fsdp_world import run_world
from tests.engines.test_virtual import engine
from tests.engines.uneven import build_uneven
from tests.runs.test_checkpoint import engine_of, shared, train, virtual_of, whole, written
from tests.small_runs import newest, small
from tests.train.test_resume import killed
from tests.train.test_trainer import last_checkpoint, without_times
from zpp_lab.api import shard
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.runs.metrics import read
from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.export.wire import WireWeights
from zpp_lab.tools.plan.planner import as_dict
from zpp_lab.train.inputs import check_recipe
from zpp_lab.train.memory.forecast import foresee
from zpp_lab.train.memory.outlook import Outlook
from zpp_lab.train.trainer import run

STEPS = 4


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(t, b[n]) if isinstance(t, Tensor) else alike(t, b[n]) for n, t in a.items()
    )


def alone(config: Config, phase: int) -> Config:
    """One of a run's phases for the whole run."""
    return config.phases[phase].config


@pytest.mark.parametrize("case", sorted(PHASED))
def test_a_phase_is_the_recipe_that_it_describes(case: str) -> None:
    """Every step is that of a run with the phase's recipe from the same state, bytes too; memories
    that the phase does not share begin anew, and what nodes keep goes on."""
    config = configured(case, 2, 2)
    made = engine(config)
    for step in range(STEPS):
        plain = engine(alone(config, min(step, 2)))
        state = made.state_dict()
        plain.load_state_dict(state)
        if not made.plan.recipe.differences:  # else what nodes keep is in the state
            plain.cell.sources = {n: t.clone() for n, t in made.cell.sources.items()}
            plain.cell.stale = made.cell.stale
        assert train(made, step, step + 1) == train(plain, step, step + 1)
        assert dict(made.cell.ledger.step) == dict(plain.cell.ledger.step)
        assert alike(made.state_dict()["weights"], plain.state_dict()["weights"])


def test_memories_go_on_where_a_phase_remembers_alike() -> None:
    made = engine(configured("phases_memory", 2, 2))
    train(made, 0, 1)
    first = {name: t.clone() for name, t in made.cell.memories.state().items()}
    assert {n.split(".")[0] for n in first} == {"grads_intra", "grads_inter"}  # at the border
    train(made, 1, 2)
    wires = {n.split(".")[0] for n in made.cell.memories.state()}
    assert wires == {"grads_intra"}, "the second hop has another store from here on"


def goes_on(folder: str, *cases: str) -> dict[str, Any]:
    found = {}
    for case in cases:
        made = engine_of(case, 2, 2)
        saved = next(shared(f"{folder}/{case}").newest_first())
        made.enter(saved.step)
        made.load_checkpoint(saved)
        results = train(made, saved.step, STEPS)
        found[case] = [results, sums(whole(made.state_dict()["weights"]))]
    return found


def sums(weights: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(weight.double().sum()) for name, weight in weights.items()}


def test_real_ranks_go_on_from_a_state_at_a_border(tmp_path: Path) -> None:
    """Written by the virtual engine, which then runs on."""
    wanted = {}
    for case in ("phases_kept", "phases_memory", "phases_differences"):
        made = virtual_of(case, 2, 2)
        train(made, 0, 2)
        written(tmp_path / case, 2, made)
        results = train(made, 2, STEPS)
        wanted[case] = [results, sums(made.state_dict()["weights"])]
    assert run_world(4, goes_on, str(tmp_path), *wanted) == wanted


# ---------------------------------------------------------------------- runs

WORDS = [
    "recipe=zeropp",
    "recipe.weights.block_size=16",
    "recipe.grads={bits:4,block_size:16,memory:{kind:residual}}",
    "recipe.phases=[{after:0.25,weights:{bits:4,block_size:16}},"
    "{after:6,grads:{bits:8,block_size:16,memory:{kind:residual}}},{after:8,grads:{}}]",
]


def test_a_run_killed_anywhere_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Here beside each border, where the next start meets another phase's state."""
    every = [*WORDS, "train.checkpoint_every=1", "train.steps=9", "train.keep_checkpoints=1"]
    summary = run(small(tmp_path, *every, f"run.dir={tmp_path / 'whole'}"))
    for done in (2, 6, 8):
        killed(small(tmp_path, *every), done)
    assert run(small(tmp_path, *every))["bytes"] == summary["bytes"]
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    assert last_checkpoint(tmp_path / "run") == last_checkpoint(tmp_path / "whole")


def test_metrics_and_summary_count_each_steps_own_bytes(tmp_path: Path) -> None:
    config = small(tmp_path, *WORDS, "train.checkpoint_every=0", "train.steps=10")
    summary, rows = run(config), read(tmp_path / "run" / "metrics.jsonl")
    assert [p.first for p in config.phases] == [0, 2, 6, 8]
    each = [sum(sum(t.values()) for t in row["bytes"].values()) for row in rows]
    assert len(set(each)) == 4
    assert [each.index(n) for n in each] == [0, 0, 2, 2, 2, 2, 6, 6, 8, 8]
    total = sum(sum(wire.values()) for wire in summary["bytes"].values())
    assert total == sum(each)
    assert summary["bytes_per_step"] * 10 == total
    assert 0 < summary["quantized_share"]["grads_intra"] < 0.9  # the last steps have none
    weights = WireWeights(config, type("At", (), {"step": 1})())  # type: ignore[arg-type]
    assert weights.recipe.wire("weights_forward").bits == 8


def test_a_branch_counts_its_own_steps(tmp_path: Path) -> None:
    run(small(tmp_path, *WORDS, "train.steps=10", f"run.dir={tmp_path / 'trunk'}"))
    there = newest(tmp_path / "trunk")
    words = ["recipe=zero3", "train.steps=4", f"run.start_from={there}"]
    phases = "recipe.phases=[{after:2,weights:{bits:4,block_size:16}}]"
    run(small(tmp_path, *words, f"run.dir={tmp_path / 'raw'}"))
    run(small(tmp_path, *words, phases, f"run.dir={tmp_path / 'phased'}"))
    raw, own = (read(tmp_path / name / "metrics.jsonl") for name in ("raw", "phased"))
    pairs = zip(raw, own, strict=True)
    same = [a["loss"] == b["loss"] and a["bytes"] == b["bytes"] for a, b in pairs]
    assert same == [True, True, False, False]


# ---------------------------------------------------------------------- settings


def phased(*phases: str, start: str = "recipe=w8") -> Config:
    return compose([start, f"recipe.phases=[{','.join(phases)}]"])


def test_a_share_is_a_step_of_the_run_and_what_is_set_stays() -> None:
    config = phased("{after:0.5,weights:{bits:4}}", "{after:120,grads:{bits:4},hops:2}")
    assert [(p.first, p.steps) for p in config.phases] == [(0, 90), (90, 30), (120, 60)]
    bits = [(p.config.recipe.weights.bits, p.config.recipe.grads.bits) for p in config.phases]
    assert bits == [(8, None), (4, None), (4, 4)]
    assert [config.at(done).recipe.hops for done in (0, 119, 120, 180)] == [1, 1, 2, 2]


@pytest.mark.parametrize(("steps", "first"), [(180, [0, 90, 94, 99]), (8, [0, 4, 5, 6])])
def test_shares_of_few_steps_keep_their_order(steps: int, first: list[int]) -> None:
    phases = [f"{{after:{a},weights:{{bits:{b}}}}}" for a, b in ((0.5, 4), (0.52, 6), (0.55, 2))]
    config = compose(["recipe=w8", f"train.steps={steps}", f"recipe.phases=[{','.join(phases)}]"])
    assert [p.first for p in config.phases] == first


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (["{after:0.5,weights:{bits:4}}", "{after:90,weights:{bits:2}}"], "begins at step 90"),
        (["{after:0.5,weights:{bits:4}}", "{after:0.5,weights:{bits:2}}"], r"recipe\.phases"),
        (["{after:0.5,weights:{bits:4}}", "{after:0.4,weights:{bits:2}}"], r"recipe\.phases"),
        (["{after:20,weights:{bits:4}}", "{after:10,weights:{bits:2}}"], r"recipe\.phases"),
        (["{after:180,weights:{bits:4}}"], "train.steps=180"),
        (["{after:1.0,weights:{bits:4}}"], "after=1.0: use steps, a whole number from 1"),
        (["{after:9,weights:{bits:8}}"], r"recipe.phases\[0\] changes nothing"),
        (["{after:9,stage:2}"], "recipe.phases.0.stage: "),
    ],
)
def test_mistakes_name_their_fix(phases: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        phased(*phases)


def test_who_cannot_follow_them_says_so() -> None:
    with pytest.raises(ValueError, match=r"recipe\.phases"):
        check_recipe(compose(["recipe=w8_then_w4", "engine=deepspeed"]))
    with pytest.raises(ValueError, match=r"zpp_lab\.shard"):
        shard(build_uneven(), "w8_then_w4", ClusterConfig(1, 2))
    with pytest.raises(ValueError, match=r"recipe\.phases="):
        arms(["w8_then_w4"], ["engine=fsdp"])


def test_a_plan_shows_each_phase_and_predicts_no_gap() -> None:
    config = compose(["recipe=w8_then_w4", "model=tiny", "recipe.phases.0.after=20"])
    whole = Outlook.of(config, 2**36)
    each = [Outlook.of(phase.config, 2**36) for phase in config.phases]
    told = as_dict(whole, [])
    assert [p["wires"] for p in told["phases"]] == [as_dict(e, [])["wires"] for e in each]
    assert told["peak"] == max(e.estimate.peak for e in each)
    assert told["gap"] is None
    assert as_dict(each[1], [])["gap"] is not None
    sent = [sum(map(sum, e.plan.step_bytes().values())) for e in each]
    assert foresee(config).step_bytes * 180 == 20 * sent[0] + 160 * sent[1]
