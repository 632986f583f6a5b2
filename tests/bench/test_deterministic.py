"""`zpp-lab bench deterministic` runs both settings and reads their steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import corpus
from zpp_lab.bench.deterministic import main, median_step, table


@pytest.mark.slow
def test_it_times_both_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data=text",
        f"data.path={corpus(tmp_path)}",
        f"data.cache_dir={tmp_path}",
        "data.heldout_every=2",
        "model.layers=1",
        "cluster=1x2",
        "engine.device=cpu",
        "train.eval_tokens=256",
    ]
    out = tmp_path / "cost.json"
    assert main([*words, "--steps=8", "--repeats=1", f"--out={out}"]) == 0
    found = json.loads(out.read_text())["ms"]
    assert all(len(found[setting]) == 1 and found[setting][0] > 0 for setting in ("true", "false"))
    assert "cost: " in capsys.readouterr().out


def test_the_table() -> None:
    shown = table({"true": [11.0, 12.0, 40.0], "false": [10.0, 8.0, 10.0]})
    assert "12.00  (11.00 to 40.00)" in shown
    assert shown.endswith("cost: +20.0 %")


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="no such setting"):
        median_step(["model.nothing=3"], "true", 8)
