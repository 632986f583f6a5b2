"""The studies of size: what they promise, that they fit, and that their small twins run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.run.test_studies import study_of
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.runs.metrics import read
from zpp_lab.study.run.launch import Launch, run_study
from zpp_lab.tools.plan.planner import Outlook
from zpp_lab.train.launch.launcher import launch
from zpp_lab.train.memory.buffers import GIB

H200 = 139.8  # GiB


def outlook_of(study: str, arm: str, *more: str) -> Outlook:
    overrides = next(a.overrides for a in study_of(study).arms if a.name == arm)
    # the GPUs of one host read each other's memory, and its links are alike
    host = ["engine.transport=peer", "engine.gather=flat", "data.tokenizer=bytes"]
    host += ["data.tokenizer_path=null", "data.end_token=null"]
    config = compose([*study_of(study).overrides, *overrides, *host, *more])
    return Outlook.of(config, int(H200 * GIB))


@pytest.mark.parametrize(
    ("study", "arm"),
    [("pretrain_13b", "zeropp"), ("finetune_30b", "w2"), ("finetune_30b", "zeropp")],
)
def test_four_gpus_hold_it(study: str, arm: str) -> None:
    outlook = outlook_of(study, arm)
    assert outlook.fits
    assert outlook.estimate.peak < 0.95 * outlook.device  # room for the allocator's holes


def small(name: str, arm: str, folder: Path, *more: str) -> Config:
    study = study_of(name)
    overrides = next(a.overrides for a in study.arms if a.name == arm)
    cache = f"data.cache_dir={folder / 'cache'}"
    return compose([*study.overrides, *overrides, cache, f"run.dir={folder / arm}", *more])


@pytest.mark.slow
def test_the_twin_runs_as_a_study_and_equals_the_virtual_cluster(tmp_path: Path) -> None:
    """One arm over gloo through the study's queue, then the same ranks in this process."""
    study, arm = study_of("pretrain_13b_x2_mini"), "zeropp"
    more = [f"data.cache_dir={tmp_path / 'cache'}", "cluster=2x1"]
    of_two = type(study)(**{**study.__dict__, "overrides": [*study.overrides, *more]})
    outcome = run_study(of_two, tmp_path / "study", Launch(arms=[arm]))
    folder = tmp_path / "study" / arm / "seed1"
    assert outcome.exit_code == 0, (folder / "log.txt").read_text()
    real = read(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["start_up"]) == [
        *("launcher", "imports", "ranks meet", "data", "engine", "checkpoint", "first step"),
        *(f"engine, {part}" for part in ("transport", "sharding", "weights")),
        *(f"first step, {part}" for part in ("forward", "backward", "norm", "update", "waiting")),
    ]
    assert summary["peak_gib"] is None
    assert not list(folder.glob("checkpoints/*"))
    # gathers are flat where all ranks share a host
    same = ("cluster=2x1", "engine.name=virtual", "engine.gather=flat")
    virtual = launch(small(study.name, arm, tmp_path, *same))
    assert virtual["heldout_loss"] == summary["heldout_loss"]
    own = read(tmp_path / arm / "metrics.jsonl")
    assert [r["loss"] for r in own] == [r["loss"] for r in real]
    assert [r["grad_norm"] for r in own] == [r["grad_norm"] for r in real]
    assert [r["bytes"] for r in own] == [r["bytes"] for r in real]


@pytest.mark.slow
def test_every_arm_of_the_pretraining_twin_runs_as_a_study(tmp_path: Path) -> None:
    """Through the queue, with processes of its own each; test_twins.py has all arms in one."""
    study = study_of("pretrain_13b_mini")
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    with_cache = type(study)(**{**study.__dict__, "overrides": [*study.overrides, cache]})
    outcome = run_study(with_cache, tmp_path / "study")
    assert outcome.exit_code == 0
    assert len(outcome.finished) == len(study.arms)
