"""The finetuning studies: one protocol in three sizes, and its smallest one for real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.study.run.launch import run_study
from zpp_lab.study.run.plan import plan_runs

SIZES = ("finetune_1b", "finetune_350m", "finetune_1b_mini")


@pytest.mark.parametrize("name", SIZES)
def test_all_arms_start_from_one_run_on_other_text(name: str, tmp_path: Path) -> None:
    first, *runs = plan_runs(load_study(name), tmp_path, compose)
    assert (first.prepares, first.config.model.start) == (True, None)
    assert first.config.data.suffixes == [".py"]
    assert {run.config.model.start for run in runs} == {str(first.dir)}
    assert {tuple(run.config.data.suffixes) for run in runs} == {
        (".h", ".hpp", ".cuh", ".cu", ".c", ".cpp")
    }
    bits = {run.arm: run.config.recipe.weights.bits for run in runs}
    assert bits == {"zero3": None, "zero3_reordered": None, "broken": 2, "w8": 8, "w4": 4, "w2": 2}
    for run in runs:  # but for the start, the text and how long: alike
        same = {"seed": 1, "recipe": first.config.recipe, "train": first.config.train}
        one = replace(run.config, **same, data=first.config.data, run=first.config.run)
        one = replace(one, tracking=first.config.tracking)
        assert replace(one, model=first.config.model) == first.config


@pytest.mark.parametrize("name", ["finetune_wires", "finetune_wires_mini"])
def test_gradients_too_have_few_bits_and_their_two_hops(name: str, tmp_path: Path) -> None:
    first, *runs = plan_runs(load_study(name), tmp_path, compose)
    assert {run.config.model.start for run in runs} == {str(first.dir)}
    configs = {run.arm: run.config for run in runs}
    nodes = {"finetune_wires": 4, "finetune_wires_mini": 2}[name]
    recipes = {arm: config.recipe for arm, config in configs.items()}
    for config in (first.config, *configs.values()):
        assert (config.cluster.nodes, config.cluster.gpus_per_node) == (nodes, nodes)
    bits = {
        arm: (recipe.weights.bits, recipe.grads_intra.bits or recipe.grads.bits, recipe.hops)
        for arm, recipe in recipes.items()
        if recipe.name not in ("zero3", "zero3_reordered", "broken")
    }
    assert bits == {
        "w4": (4, None, 1),
        "g8": (None, 8, 1),
        "g4": (None, 4, 1),
        "w4g4": (4, 4, 1),
        "qsdp": (8, 8, 1),
        "zeropp": (8, 4, 2),
        "g8_4_hadamard": (None, 8, 2),
        "w4_g84h": (4, 8, 2),
    }
    assert [recipes[arm].grads_inter.bits for arm in ("g8_4_hadamard", "w4_g84h")] == [4, 4]


def test_the_wires_are_compared_on_as_many_tokens_as_the_gathers() -> None:
    tokens = set()
    for name in ("finetune_350m", "finetune_wires"):
        config = compose(load_study(name).overrides)
        tokens.add(config.cluster.world * config.train.batch_size * config.data.seq_len)
    assert len(tokens) == 1


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
    assert run_study(study, root, 2).exit_code == 0
    assert Saved(root / "prepare" / "base" / "checkpoints" / "step-00000004").step == 4
    firsts, held = {}, {}
    for arm in ("zero3", "w2"):
        folder = root / arm / "seed1"
        firsts[arm] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        held[arm] = json.loads((folder / "heldout.json").read_text())["hash"]
        assert not (folder / "checkpoints").exists()
    assert firsts["zero3"] != firsts["w2"], "the same weights, through other gathers"
    assert held["zero3"] == held["w2"]
    assert len(run_study(study, root, 2).skipped) == 3
