"""`zpp-lab bench calibrate`: its pieces on the CPU, and (slow) all of it on gloo."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from zpp_lab.bench.calibrate import TINY, _between, main, parser
from zpp_lab.bench.calibrate_compute import block_seconds, copy_rate, curve, flops, rising
from zpp_lab.bench.calibrate_links import codecs
from zpp_lab.compose import compose
from zpp_lab.cost.machine import OPERATORS, Between, load_machine
from zpp_lab.cost.model import block_work, plan_of
from zpp_lab.cost.step import predict

CPU = torch.device("cpu")


def test_flops_are_those_of_the_cost_model() -> None:
    config = compose(["model=1_3b", "data.seq_len=2048", "train.batch_size=1", "cluster=1x4"])
    assert flops((2048, 5504, 16, 2048)) == block_work(plan_of(config).units[0], config).forward


def test_a_curve_never_falls() -> None:
    curve = rising([(3.0, 1.0), (1.0, 2.0), (4.0, 5.0)])
    assert curve.points == ((1.0, 2.0), (3.0, 2.0), (4.0, 5.0))


def test_blocks_and_memory_take_time() -> None:
    assert len(curve(TINY.widths, "eager", CPU).points) == len(TINY.widths)
    assert block_seconds(TINY.widths[0], "eager", CPU) > 0
    assert copy_rate(2**16, CPU) > 0


def test_every_codec_of_the_family_is_timed() -> None:
    found = codecs([4], 1024, CPU)
    assert found.launch_s > 0
    for op in OPERATORS:
        drawn = {"4r", "4rh"} if op in ("encode", "decode_sum_encode") else set()
        assert set(found.seconds[op]) == {"raw", "4", "4h"} | drawn


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
