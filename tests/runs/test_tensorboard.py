"""`tracking=tensorboard`: what wandb gets, as event files, beside records that stay as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_gaps import STEPS, config, study_file, write
from tests.small_runs import small
from zpp_lab.config.compose import compose
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.runs.tracker import Tracker
from zpp_lab.runs.wandb.identity import flat
from zpp_lab.train.trainer import run


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def scalars(folder: Path, name: str) -> dict[int, float]:
    found = events(folder)
    return {event.step: event.value for event in found.Scalars(name)}


def test_every_number_of_the_records_is_there_and_the_records_are_as_without(
    tmp_path: Path,
) -> None:
    words = ("recipe=zeropp", "recipe.weights.block_size=16")
    run(small(tmp_path, *words, f"run.dir={tmp_path / 'plain'}"))
    summary = run(small(tmp_path, *words, "tracking=tensorboard"))
    plain, own = (
        [unmeasured(line) for line in read(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "run")
    )
    assert plain == own
    found = events(tmp_path / "run")
    tags = set(found.Tags()["scalars"])
    line = own[3]  # with held-out loss and telemetry
    for name, value in flat(line, counted=lambda *_: None):
        if isinstance(value, int | float):
            assert {e.step: e.value for e in found.Scalars(name)}[4] == pytest.approx(value)
    assert {"tokens_per_second", "memory/host_gib", "wait/data"} <= tags
    assert any(name.endswith("nmse_by_class") for name in found.Tags()["histograms"])
    (last,) = found.Scalars("final/heldout_loss")
    assert (last.step, last.value) == (12, pytest.approx(summary["heldout_loss"]))


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    cfg = compose(["tracking=tensorboard", "train.steps=8"])
    for steps, loss in ((range(1, 7), 1.0), (range(5, 9), 2.0)):
        tracker = Tracker(cfg, tmp_path, steps.start - 1)
        for step in steps:
            tracker.log({"step": step, "loss": loss, "tokens": step})
        tracker.pause()
    assert scalars(tmp_path, "loss") == dict.fromkeys(range(1, 5), 1.0) | dict.fromkeys(
        range(5, 9), 2.0
    )


def test_gaps_follow_the_baseline(tmp_path: Path) -> None:
    study_file(tmp_path)
    cfg = compose(["tracking=tensorboard", "run.study=s", "run.arm=w4", f"train.steps={STEPS}"])
    arm = write(tmp_path / "w4" / "seed1", cfg, 0.5, end=False)  # before its baseline
    write(tmp_path / "zero3" / "seed1", config("zero3"), 0.25)
    arm.finish({"outcome": "finished", "steps": STEPS, "bytes": {}, "heldout_loss": None})
    gaps = scalars(tmp_path / "w4" / "seed1", "gap_vs_zero3/loss")
    assert gaps == dict.fromkeys(range(1, STEPS + 1), 0.25)


def test_without_the_package_the_extra_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    with pytest.raises(ValueError, match=r"pip install 'zpp_lab\[tensorboard\]'"):
        run(small(tmp_path, "tracking=tensorboard"))
    assert not (tmp_path / "run" / "config.yaml").exists()
