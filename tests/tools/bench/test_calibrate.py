"""`zpp-lab bench calibrate`: its pieces on the CPU, and (slow) all of it on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zpp_lab.config.compose import compose
from zpp_lab.tools.bench.calibrate import main
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.step import predict


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
    assert machine.bus is not None


@pytest.mark.slow
def test_one_rank_has_a_bus_and_no_links(tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    assert main(["--out", str(path), "--tiny", "--cpu", "--ranks", "1", "--bits", "4"]) == 0
    machine = load_machine(str(path))
    assert machine.bus is not None
    assert machine.intra is None
    words = ["engine=fsdp", "recipe=zero3", "train.param_dtype=bf16", "cluster.nodes=1"]
    assert predict(compose([*words, "cluster.gpus_per_node=1"]), machine).step_s > 0
    with pytest.raises(ValueError, match="intra"):
        predict(compose([*words, "cluster.gpus_per_node=2"]), machine)
