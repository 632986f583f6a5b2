"""The finetuning studies: one protocol in three sizes, and its smallest one for real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from zpp_lab.config.compose import load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.study.run.launch import Launch, run_study


def shorter(folder: Path) -> StudyConfig:
    """finetune_1b_mini with less of everything: two arms, one seed, three steps."""
    less = [
        "data.max_bytes=600000",
        "data.heldout_every=5",
        "train.steps=3",
        "train.eval_every=3",
        "train.warmup_steps=1",
    ]
    less += ["model.dim=16", "model.ffn=24", "model.layers=1", "train.eval_tokens=1024"]
    less += [f"data.cache_dir={folder / 'cache'}", "tracking.wandb=off", "engine.threads=1"]
    study = load_study("finetune_1b_mini", {"seeds": [1]}, less)
    first = [replace(p, overrides=[*p.overrides, "train.steps=4"]) for p in study.prepare]
    return replace(study, arms=[a for a in study.arms if a.name in ("zero3", "w2")], prepare=first)


def test_it_pretrains_once_and_finetunes_from_there(tmp_path: Path) -> None:
    root = tmp_path / "study"
    study = shorter(tmp_path)
    assert run_study(study, root, Launch(jobs=2)).exit_code == 0
    assert Saved(root / "prepare" / "base" / "checkpoints" / "step-00000004").step == 4
    firsts, held = {}, {}
    for arm in ("zero3", "w2"):
        folder = root / arm / "seed1"
        firsts[arm] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        held[arm] = json.loads((folder / "heldout.json").read_text())["hash"]
        assert not (folder / "checkpoints").exists()
    assert firsts["zero3"] != firsts["w2"], "the same weights, through other gathers"
    assert held["zero3"] == held["w2"]
    assert len(run_study(study, root, Launch(jobs=2)).skipped) == 3
