"""`zpp-lab bench calibrate`: its pieces on the CPU, and (slow) all of it on gloo."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from zpp_lab.config.compose import compose
from zpp_lab.tools.bench.calibrate import TINY, _between, main, parser
from zpp_lab.tools.bench.calibrate_steps import (
    Case,
    Times,
    figures,
)
from zpp_lab.tools.plan.cost.machine import Between, load_machine
from zpp_lab.tools.plan.cost.step import predict

CPU = torch.device("cpu")


def test_the_hosts_figures_put_the_measured_step_together_again() -> None:
    """Of 1 and 5 blocks: forward 1, backward 2, computed again 1.5, gather 0.25, reduction 0.5, and
    each block 0.125 and each step 3 beside."""
    forward, backward, again, gather, reduce, rest, once = 1.0, 2.0, 1.5, 0.25, 0.5, 0.125, 3.0
    times: dict[Case, Times] = {}
    for n in (1, 5):
        ends = 10.0, 20.0  # embedding and head
        alone = ends[0] + n * forward, ends[1] + n * backward
        times["alone", "eager", n] = alone
        passes = alone[0] + (n + 1) * gather, alone[1] + n * gather + (n + 1) * reduce
        block = forward + backward + rest
        step = once + n * block + (2 * n + 1) * gather + (n + 1) * reduce
        times["fsdp2", "eager", n] = *passes, step
        times["again", "eager", n] = passes[0] - 0.5 * n, passes[1] + (0.5 + again) * n, step
    found = figures(times, 5, ["eager"], 0.5)
    assert found.block_forward_s == {"eager": pytest.approx(forward)}
    assert found.block_backward_s == {"eager": pytest.approx(backward)}
    assert found.block_again_s == {"eager": pytest.approx(again)}
    assert (found.gather_s, found.reduce_s) == (pytest.approx(gather), pytest.approx(reduce))
    assert found.block_rest_s == pytest.approx(rest)
    assert found.step_s == pytest.approx(once)
    assert found.lacks == []


def test_links_between_nodes_are_measured_given_or_said_not_to_be() -> None:
    def between(*words: str) -> tuple[Between, str]:
        args: argparse.Namespace = parser().parse_args(["--out", "m.json", *words])
        return _between(args, None, TINY, None)  # type: ignore[arg-type]

    assert between() == (
        Between(0.0, 1.0),
        "not measured: the nominal speed without latency, a lower bound",
    )
    given, source = between("--efficiency", "0.9", "--latency-us", "20")
    assert (given.latency_s, given.efficiency) == (pytest.approx(2e-5), 0.9)
    assert "not measured" in source


@pytest.mark.parametrize("modes", ["compiled", "eager,fast"])
def test_modes_are_checked_before_anything_is_measured(modes: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--modes"):
        main(["--out", str(tmp_path / "m.json"), "--modes", modes])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without GPUs")
def test_without_gpus_only_a_try_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tiny"):
        main(["--out", str(tmp_path / "m.json")])


@pytest.mark.slow
def test_a_whole_calibration_makes_a_machine_that_predicts(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    assert main(["--out", str(path), "--tiny", "--cpu", "--ranks", "2", "--bits", "8,4"]) == 0
    machine = load_machine(str(path))
    assert machine.name == "here"
    bf16 = ["train.param_dtype=bf16", "train.reduce_dtype=bf16", "engine=fsdp"]
    found = predict(compose(["recipe=zeropp", "cluster=2x2", *bf16]), machine, 1.0)
    assert found.step_s > 0
