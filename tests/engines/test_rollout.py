"""Weights for generation: both engines, both gathers, their bytes and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engines import rollout_jobs as jobs
from tests.engines.fsdp_world import run_world
from zpp_lab.collectives.traffic import NOTHING
from zpp_lab.config.schema import TrainConfig
from zpp_lab.config.wires import ROLLOUT
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.rollout import captures
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models.generate import generate

CLUSTERS = {
    (2, 2): {*jobs.CASES},
    (1, 3): {*jobs.ONE_NODE},
    (3, 1): {*jobs.LONE_RANKS, *jobs.LONE_KEPT},
}
QUICK = {  # each case on one cluster
    (2, 2): {"hops", "kept", "differences", "whole", "copies", "placed"},
    (1, 3): {*jobs.ONE_NODE} - {"hops"},
    (3, 1): {*jobs.LONE_KEPT},
}
SHAPES = pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c[0]}x{c[1]}")


def agree(cases: set[str], nodes: int, local: int, *twins: str) -> None:
    found = run_world(nodes * local, jobs.compare, sorted(cases), nodes, local, twins)
    assert {case: text for case, text in found.items() if text} == {}
    assert {*found} == cases


@SHAPES
def test_engines_and_gathers_agree_to_the_bit(cluster: tuple[int, int]) -> None:
    agree(QUICK[cluster], *cluster, "token")  # both gathers of real ranks agree


@pytest.mark.slow
@SHAPES
def test_all_cases_agree_to_the_bit(cluster: tuple[int, int]) -> None:
    agree(CLUSTERS[cluster], *cluster, *jobs.GATHERS)


def test_every_case_is_quick_on_one_cluster() -> None:
    assert set().union(*QUICK.values()) == {*jobs.CASES, *jobs.LONE_KEPT}


def virtual(case: str = "stochastic", **engine: Any) -> VirtualEngine:
    return jobs.virtual(jobs.configured(case, 2, 2, **engine))


def test_bytes_are_counted_in_the_next_step() -> None:
    """Once a rollout, or for the passes of the slowest rank; not those of an evaluation."""
    engine = virtual()
    once = engine.plan.rollout_bytes(None)[ROLLOUT]
    assert once == sum((u.rollout_legs(1)[0].traffic for u in engine.plan.units), NOTHING)
    assert sum(once) > 0
    jobs.roll(engine, 0, "rollout")
    jobs.roll(engine, 0, "token")
    with engine.rollout(0, counted=False):
        pass
    passes = 2 * jobs.NEW
    assert engine.step(0, 1e-2, jobs.batch, False).bytes[ROLLOUT] == once * (1 + passes)
    assert ROLLOUT not in engine.step(1, 1e-2, jobs.batch, False).bytes


def test_bits_of_a_rollout_change_its_tokens_and_no_step() -> None:
    rolled, steps = {}, {}
    for case in ("raw", "stochastic"):
        config = jobs.configured(case, 2, 2)
        engine = jobs.virtual(replace(config, train=TrainConfig(steps=10)))
        rolled[case] = jobs.roll(engine, 0, "rollout")
        result = engine.step(0, 1e-2, jobs.batch, False)
        steps[case] = result.loss, result.grad_norm
    assert steps["raw"] == steps["stochastic"]
    assert not rolled["raw"][0][2].equal(rolled["stochastic"][0][2])


@pytest.mark.parametrize("case", sorted(jobs.CASES))
def test_weights_that_changed_meanwhile_are_an_error(case: str) -> None:
    engine = virtual(case)
    with engine.rollout(0) as policy:
        row = next(iter(engine.cell.master.values())).view(-1)
    with pytest.raises(RuntimeError, match="rollout"), engine.rollout(0):
        row[3] = torch.nextafter(row[3], row[3] + 1)  # one bit: few-bit codecs would not show it
    with pytest.raises(RuntimeError, match="ended"):
        generate(policy, *jobs.prompts(0, 0).values(), (1, 0), 2, 1.0, jobs.END, bool)


def test_ranks_generate_equally_often() -> None:
    engine = virtual()
    with pytest.raises(ValueError, match="equally"), engine.rollout(0, "token") as policy:
        generate(policy.turn(2), *jobs.prompts(0, 0).values(), (1, 0), 2, 1.0, jobs.END, bool)


def test_expandable_segments_leave_generation_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    engine = virtual()
    assert captures(engine.model, engine.config.engine, torch.device("cuda")) is None


def test_bits_without_rollouts_are_an_error() -> None:
    config = jobs.configured("stochastic", 2, 2)
    with pytest.raises(ValueError, match=ROLLOUT):
        build_plan(jobs.model_of(config), config)
    lone = jobs.configured("kept", 2, 1)
    with pytest.raises(ValueError, match=ROLLOUT):
        build_plan(jobs.model_of(lone), lone, rollouts=True)


@pytest.mark.parametrize(
    "names",
    [
        ["zero3", "zeropp", "differences"],
        pytest.param(["ordered"], marks=pytest.mark.slow),
    ],
    ids=["most", "ordered"],
)
def test_users_loops_generate_with_whole_weights(names: list[str]) -> None:
    found = run_world(4, jobs.user_loops, names)
    assert [*found] == names
    for name, ranks in found.items():
        raw = "weights_rollout" not in jobs.USERS[name]
        for rolled, plain in ranks:
            assert rolled["losses"] == plain["losses"], name
            assert rolled["as whole"] == [[True, True]] * 2 if raw else not rolled["as whole"][0][1]
            assert rolled["bytes"] == ([None] * 2 if name == "zero3" else rolled["planned"])
            assert rolled["planned"][0][0] > 0
            assert "rollout" in rolled["stale"]
