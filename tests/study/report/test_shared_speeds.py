"""Speeds of GPUs that nodes shared: kept apart from others, said, and predicted as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.report.fake_speeds import ARMS, Arm, rows, write_speeds
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.study.speed.results import read_speeds
from zpp_lab.study.speed.speeds import speed_ups
from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.bench.step.results import config_text
from zpp_lab.tools.plan.cost import show
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.step import predict

LINKS = {(2, 2): ("12", "25")}
LARGE = ["model=1_3b", "data.seq_len=2048", "train.batch_size=1", "cluster=2x2"]


def both(folder: Path) -> Path:
    """The same shape on four GPUs, and on two that nodes shared, where steps took twice as long."""
    slow = [Arm(a.name, 2 * a.gigabytes, 2 * a.compute, a.engine, a.config) for a in ARMS]
    return write_speeds(folder, rows(ARMS, LINKS) + rows(slow, LINKS, ranks_per_gpu=2))


def test_shared_and_whole_gpus_are_never_compared(tmp_path: Path) -> None:
    measured = read_speeds(both(tmp_path))
    assert {m.setting.ranks_per_gpu for m in measured} == {1, 2}
    ups = {(u.at.arm, u.at.link, u.at.setting.ranks_per_gpu): u.value for u in speed_ups(measured)}
    assert ups["zeropp", "12", 2] == pytest.approx(ups["zeropp", "12", 1])  # each by its own base


def test_predictions_are_of_the_shared_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "POINTS", 1)
    made = [Arm(a.name, 1, 1, a.engine, json.loads(config_text(a.config)))
            for a in arms(["fsdp2", "zeropp"], LARGE)]  # fmt: skip
    table = rows(made, {(2, 2): ("50",)}, ranks_per_gpu=2)
    found, faults = show.predictions(read_speeds(write_speeds(tmp_path, table)), "h200")
    assert faults == []
    said = {p.arm: p.tokens_per_s for p in found}
    config = load(Config, predicted_config(tmp_path))
    machine = load_machine("h200")
    assert said["zeropp"] == predict(config, machine.shared(2), 50.0).tokens_per_s
    assert said["zeropp"] < predict(config, machine, 50.0).tokens_per_s


def predicted_config(folder: Path) -> dict[str, object]:
    one = next(m for m in read_speeds(folder) if m.arm == "zeropp")
    assert one.config is not None
    return {**one.config, "model": {**one.config["model"], "vocab_size": 32000}}
