"""The loss gap as a series of its own: in a step's row when known, after the last step else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs.conftest import FakeWandb
from tests.runs.test_wandb_sink import LIMIT, state
from tests.runs.wandb_file import OfflineRun
from zpp_lab.config.schema import (
    Config,
    RecipeConfig,
    RunConfig,
    TrackingConfig,
    TrainConfig,
)
from zpp_lab.runs.tracker import Tracker
from zpp_lab.runs.wandb.process import start_study_sink
from zpp_lab.runs.wandb.sink import sync

STEPS = 6


def config(arm: str, study: str | None = "s", seed: int = 1) -> Config:
    recipe = RecipeConfig(name=arm)
    tracking = TrackingConfig(wandb="off", timeout_seconds=LIMIT)
    run = RunConfig(study=study, arm=arm if study else None)
    return Config(
        seed=seed, train=TrainConfig(steps=STEPS), recipe=recipe, tracking=tracking, run=run
    )


def write(folder: Path, cfg: Config, loss: float, end: bool = True, steps: int = STEPS) -> Tracker:
    """A run whose losses lie `loss` above the step's number, held out every second step."""
    tracker = Tracker(cfg, folder, 0)
    for step in range(1, steps + 1):
        heldout = {"heldout_loss": step + 2 * loss} if step % 2 == 0 else {}
        tracker.log({"step": step, "loss": step + loss, "tokens": step, "seconds": step, **heldout})
    if end:
        wires = {"weights_forward": {"intra": 600, "inter": round(60 / (1 + loss))}}
        result = {"heldout_loss": STEPS + 2 * loss, "steps": STEPS, "bytes": wires}
        tracker.finish({"outcome": "finished", "tokens": 12, "seconds": 3.0, **result})
    return tracker


def study_file(root: Path, *arms: dict[str, Any]) -> None:
    listed = [{"name": "zero3"}, {"name": "w4"}, *arms]
    root.mkdir(exist_ok=True)
    (root / "study.yaml").write_text(yaml.safe_dump({"baseline": "zero3", "arms": listed}))


def auto(cfg: Config) -> Config:
    return replace(cfg, tracking=replace(cfg.tracking, wandb="auto"))


def test_a_study_has_the_gap_in_every_row(tmp_path: Path) -> None:
    study_file(tmp_path)
    write(tmp_path / "w4" / "seed1", auto(config("w4")), 0.5)
    write(tmp_path / "zero3" / "seed1", auto(config("zero3")), 0.0)
    handle = start_study_sink(tmp_path, TrackingConfig())
    assert handle.wait(LIMIT), (tmp_path / "wandb.log").read_text()
    arm, base = (OfflineRun(tmp_path / name / "seed1") for name in ("w4", "zero3"))
    assert [row["gap_vs_zero3/loss"] for row in arm.history] == [0.5] * STEPS
    held = [row.get("gap_vs_zero3/heldout_loss") for row in arm.history]
    assert held == [None, 1.0] * 3
    assert [row["gap_vs_zero3/step"] for row in arm.history] == list(range(1, STEPS + 1))
    assert "gap_vs_zero3/loss" not in base.history[0]
    assert arm.metrics["gap_vs_zero3/*"].step_metric == "gap_vs_zero3/step"
    loss = arm.metrics["heldout_loss"]
    assert (loss.step_metric, loss.summary.min, loss.summary.last) == ("step", True, True)
    assert arm.summary["final/gap_vs_zero3"] == 1.0
    assert arm.summary["final/bytes_share_inter"] == pytest.approx(40 / 60)
    assert arm.summary["final/tokens_per_second"] == 4.0
    assert arm.summary["heldout_loss"]["min"] == 3.0


def test_a_baseline_that_is_behind_gives_its_gaps_later(
    tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    runs = tmp_path / "runs"
    write(runs / "w4" / "seed1", config("w4", None), 0.25)
    theirs = write(runs / "zero3" / "seed1", config("zero3", None), 0.0, end=False, steps=2)
    sync(runs / "w4" / "seed1")
    run_id = state(runs / "w4" / "seed1")["id"]
    rows = [json.loads(line) for line in fake_wandb.runs[run_id]["lines"]]
    assert [row.get("gap_vs_zero3/loss") for row in rows] == [0.25] * 2 + [None] * 4
    for step in range(3, STEPS + 1):
        theirs.log({"step": step, "loss": float(step), "tokens": step, "seconds": 1.0})
    for _ in range(2):  # the second time there is nothing left to send
        sync(runs / "w4" / "seed1")
        rows = [json.loads(line) for line in fake_wandb.runs[run_id]["lines"]]
        assert [row["_step"] for row in rows] == list(range(1, STEPS + 5))
        late = [(row["gap_vs_zero3/step"], row["gap_vs_zero3/loss"]) for row in rows[STEPS:]]
        assert late == [(step, 0.25) for step in range(3, STEPS + 1)]
    assert state(runs / "w4" / "seed1")["sent_step"] == STEPS
