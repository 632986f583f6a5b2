"""Predicted speeds of measured arms: which have some, and at which bandwidths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.report.fake_speeds import ARMS, Arm, rows, write_speeds
from zpp_lab.study.report.speed.results import Measured, read_speeds
from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.bench.step.results import config_text
from zpp_lab.tools.plan.cost import show

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
