"""Predicted speeds of measured arms: which have some, and at which bandwidths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.report.fake_speeds import ARMS, Arm, rows, write_speeds
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.study.report.speed.results import Measured, read_speeds
from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.bench.step.results import config_text
from zpp_lab.tools.plan.cost import show
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.step import predict

SMALL = ["model.dim=256", "model.ffn=512", "data.seq_len=128", "train.batch_size=1"]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    monkeypatch.setattr(show, "POINTS", 3)
    made = arms(["fsdp2", "zeropp"], SMALL)
    own = [Arm(a.name, 1.0, 0.2, a.engine, json.loads(config_text(a.config))) for a in made]
    others = [ARMS[1], Arm("bare", 1.0, 0.1, config={"train.param_dtype": "fp32"})]
    table = rows([*own, *others], {(2, 2): ("12", "100"), (1, 4): ("max",)})
    for row in table:
        if row["arm"] == "bare" and row["nodes"] == "1":
            row["config"] = ""
    return read_speeds(write_speeds(tmp_path, table))


def test_predictions_lie_at_the_measured_links_and_between(measured: list[Measured]) -> None:
    found, faults = show.predictions(measured, "h200")
    links = {(p.setting.nodes, p.arm): [] for p in found}
    for p in found:
        links[p.setting.nodes, p.arm].append(p.gbps)
    assert set(links) == {(2, "fsdp2"), (2, "zeropp"), (1, "fsdp2"), (1, "zeropp")}
    assert links[1, "zeropp"] == [None]
    assert links[2, "zeropp"] == [
        12,
        pytest.approx(24.3, abs=0.1),
        pytest.approx(49.3, abs=0.1),
        100,
    ]
    rates = [p.tokens_per_s for p in found if (p.setting.nodes, p.arm) == (2, "fsdp2")]
    assert rates == sorted(rates)
    assert any(f.startswith("fsdp2+node has no prediction: the cost model knows") for f in faults)
    assert any("train.param_dtype=fp32" in fault for fault in faults)
    assert "bare has no prediction: the table does not say its config." in faults


def test_the_model_is_the_one_that_was_timed(measured: list[Measured]) -> None:
    """A bench draws random tokens of 32 000 where the model takes its tokenizer's vocabulary."""
    found, _ = show.predictions(measured, "h200")
    one = next(m for m in measured if m.arm == "zeropp" and m.link == "12")
    assert one.config is not None
    model = dict(one.config["model"]) | {"vocab_size": 32000}
    config = load(Config, {**one.config, "model": model})
    said = next(p.tokens_per_s for p in found if p.arm == "zeropp" and p.gbps == 12)
    assert said == predict(config, load_machine("h200"), 12.0).tokens_per_s


def test_an_unknown_machine_is_an_error(measured: list[Measured]) -> None:
    with pytest.raises(ValueError, match="no such file"):
        show.predictions(measured, "nothing")
