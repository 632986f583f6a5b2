"""The reward `learned`: what it scores, what it refuses, and that policies learn from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.fsdp_world import run_world
from tests.small_runs import newest
from tests.train.rl.test_reward_model import SMALL as PAIRS
from tests.train.rl.test_reward_model import in_each_rank
from tests.train.rl.test_runs import ARMS, SMALL, kill_and_resume, lines, same_end
from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of
from zpp_lab.models import build_model
from zpp_lab.runs.checkpoint.read import Saved, flat
from zpp_lab.tools.export.model import export_hf
from zpp_lab.train.memory.estimate import estimate
from zpp_lab.train.rl import rewards
from zpp_lab.train.rl.learned import Learned, check_learned
from zpp_lab.train.trainer import run

REWARD = ("rl.rewards=[addition,learned]", "rl.weights=[0,1]")


def place(folder: Path, name: str) -> list[str]:
    return [f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model after a few steps."""
    folder = tmp_path_factory.mktemp("reward")
    run(compose([*PAIRS, *place(folder, "run")]))
    return folder / "run"


def policy(folder: Path, name: str, learned: Path, *overrides: str) -> Config:
    return compose([*SMALL, *REWARD, f"rl.learned={learned}", *place(folder, name), *overrides])


def asked() -> dict[str, Any]:
    """Two prompts: of one the completion has an end marker, of the other none fits."""
    prompts, completions = ["12+34=", "1="], ["046", "9"]
    prompt_ids = [[0, *text.encode()] for text in prompts]
    completion_ids = [[*b"046", 0], [*b"9"]]
    return {
        **{"prompts": prompts, "completions": completions, "completion": ["046", "1"]},
        **{"prompt_ids": prompt_ids, "completion_ids": completion_ids},
    }


def test_a_score_is_read_at_the_last_token(reward: Path) -> None:
    scores = Learned(reward, torch.device("cpu"))(**asked())
    model = build_model(compose([*PAIRS]).model, 256)
    saved = dict(flat(Saved(newest(reward)).state()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(saved[f"weights.{name}"])
        alone = [model(torch.tensor([[0, *text]]))[0, -1] for text in (b"12+34=046", b"1=9")]
    np.testing.assert_allclose(scores, torch.stack(alone).tolist(), rtol=1e-5)


def test_an_export_scores_as_its_run_does(reward: Path, tmp_path: Path) -> None:
    export_hf(reward, tmp_path / "export")
    each = (Learned(path, torch.device("cpu")) for path in (reward, tmp_path / "export"))
    ours, theirs = (learned(**asked()) for learned in each)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4)
    run(policy(tmp_path, "run", tmp_path / "export", "train.steps=2"))


def test_both_engines_agree(reward: Path, tmp_path: Path) -> None:
    arms = {"raw": (), "w4": (*ARMS["w4"][:4], "recipe.weights_rollout.rounding=stochastic")}
    own = ("rl.algorithm=rloo", "rl.correction=sequence")
    real = ("engine=fsdp", "engine.ordered=true", "engine.device=cpu", "engine.threads=1")
    where = {"raw": "cluster=1x2", "w4": "cluster=2x1"}
    there = [policy(tmp_path, f"{a}_fsdp", reward, *own, *arms[a], where[a], *real) for a in arms]
    run_world(2, in_each_rank, *there)
    for arm, other in zip(arms, there, strict=True):
        here = policy(tmp_path, arm, reward, *own, *arms[arm], where[arm])
        run(here)
        assert lines(here) == lines(other), arm
        assert same_end(here, other), arm
        rewards = [line["rl"]["rewards"]["learned"] for line in lines(here)]
        assert len({*rewards}) > 1
        assert rewards == [line["rl"]["reward"] for line in lines(here)]
        assert (lines(here)[0]["rl"]["mismatch"] > 1e-4) == (arm == "w4")


def test_a_killed_run_ends_with_the_same_bits(reward: Path, tmp_path: Path) -> None:
    """Killed between two steps of a rollout, whose scores lie on the disk."""
    whole, other = (policy(tmp_path, name, reward) for name in ("whole", "killed"))
    run(whole)
    kill_and_resume("line 4", other)
    assert lines(other) == lines(whole)
    assert same_end(other, whole)


def test_a_reward_model_may_not_change_under_a_run(reward: Path, tmp_path: Path) -> None:
    shutil.copytree(reward, tmp_path / "reward")
    run(policy(tmp_path, "run", tmp_path / "reward", "run.piece_steps=2"))
    again = compose([*PAIRS, f"data.cache_dir={tmp_path / 'cache'}", "train.steps=2"])
    shutil.rmtree(tmp_path / "reward")
    run(replace(again, run=replace(again.run, dir=str(tmp_path / "reward"))))
    with pytest.raises(ValueError, match=r"rl\.learned.*run\.resume=false"):
        run(policy(tmp_path, "run", tmp_path / "reward"))
    run(policy(tmp_path, "run", tmp_path / "reward", "run.resume=false"))


def test_memory_has_a_line_of_the_reward_model(reward: Path, tmp_path: Path) -> None:
    config = policy(tmp_path, "run", reward)
    found = estimate(plan_of(config), config, 256)
    numel = sum(p.numel() for p in build_model(compose([*PAIRS]).model, 256).parameters())
    assert found.item("reward model of rank 0").nbytes["loss"] >= 4 * numel


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("nowhere", "rl.learned"),
        ("empty", "rl.learned"),
        ("list", "config.json"),
        ("text", "task=text"),
        ("causal", "rl.learned"),
        ("bpe", "data.tokenizer"),
    ],
)
def test_models_that_are_refused(
    tmp_path: Path, wrong: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[1]")
    lm = ("task=text", "data.pairs=false", "model.scalar_head=false", "train.steps=1")
    if wrong in ("text", "causal"):
        run(compose([*PAIRS, *place(tmp_path, "text"), *lm]))
    if wrong == "causal":
        export_hf(tmp_path / "text", tmp_path / "causal")
    if wrong == "bpe":
        own = ("train.steps=1", "data.tokenizer=bpe", "data.vocab_size=260", "data.max_bytes=0")
        run(compose([*PAIRS, *place(tmp_path, "bpe"), *own]))
    capsys.readouterr()
    learned = [f"rl.learned={tmp_path / wrong}", *place(tmp_path, "run")]
    assert main(["train", *SMALL, *REWARD, *learned]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("labels", [{}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}])
def test_classifiers_with_several_labels_are_refused(tmp_path: Path, labels: dict) -> None:
    """By their settings: transformers leaves out those of two labels."""
    settings = {"architectures": ["LlamaForSequenceClassification"]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings | labels))
    with pytest.raises(ValueError, match=r"rl\.learned.*num_labels"):
        check_learned(tmp_path)
    for one in ({"num_labels": 1}, {"id2label": {"0": "score"}}):
        file.write_text(json.dumps(settings | one))
        check_learned(tmp_path)


def test_the_reward_and_its_model_need_each_other(tmp_path: Path) -> None:
    alone = ["rl.rewards=[learned]"]
    for own in (alone, [*alone, "rl.learned="], ["rl.learned=x"], ["rl.learned="]):
        with pytest.raises(ValueError, match=r"rl\.learned"):
            compose([*SMALL, *own])


# ---------------------------------------------------------------------- learning

LETTERS = "abcdefghijklmnop"


def written(path: Path, records: list[dict[str, str]]) -> list[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["data=jsonl", f"data.path={path}", "data.seq_len=8", "data.heldout_every=4"]


def of_the_first_letter(folder: Path) -> tuple[list[str], list[str]]:
    """Overrides of a task, "fk=" to "f", in whose answers some letters are random, and of its pairs
    of a right and a wrong answer."""
    draw, noisy, pairs = np.random.default_rng(0), [], []
    for _ in range(1200):
        right, other, wrong = draw.permutation(list(LETTERS))[:3].tolist()
        asked = {"prompt": f"{right}{other}="}
        said = wrong if draw.random() < 0.5 else right
        noisy.append(asked | {"completion": said, "first": right})
        pairs.append(asked | {"chosen": right, "rejected": wrong if draw.random() < 0.5 else other})
    return written(folder / "noisy.jsonl", noisy), written(folder / "pairs.jsonl", pairs)


def first(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(a == b) for a, b in zip(columns["first"], completions, strict=True)]


@pytest.mark.slow
def test_a_policy_learns_from_a_learned_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that samples right answers half of the time; then RLOO, which never sees one."""
    monkeypatch.setitem(rewards._SHIPPED, "first", first)
    text, pairs = of_the_first_letter(tmp_path)
    shape = ("model.dim=32", "model.ffn=64", "train.warmup_steps=5", "train.eval_every=1000")
    shape = (*shape, "cluster.gpus_per_node=1", "data.max_bytes=0", "train.eval_tokens=32768")
    more = (*shape, "train.steps=350", "train.batch_size=64", "train.lr=0.01")
    lm = ("task=text", "data.pairs=false", "model.scalar_head=false", "data.records.pack=false")
    run(compose([*PAIRS, *place(tmp_path, "start"), *text, *more, *lm]))
    start = f"model.start={tmp_path / 'start'}"
    judge = run(compose([*PAIRS, *place(tmp_path, "reward"), *pairs, *more, start]))
    assert judge["heldout_accuracy"] >= 0.95
    assert "perplexity" not in judge
    learned = ("rl.rewards=[first,learned]", "rl.weights=[0,1]", "rl.algorithm=rloo")
    setup = (*SMALL, *learned, f"rl.learned={tmp_path / 'reward'}", *text, *shape, start)
    rest = ("train.batch_size=256", "rl.prompts=32", "rl.samples=8", "rl.steps_per_rollout=1")
    rest = (*rest, "rl.max_new_tokens=3", "rl.kl=0.02", "train.steps=40")
    rest = (*rest, "rl.diverge_below=0")
    after = run(compose([*setup, *rest, *place(tmp_path, "rl"), "train.lr=0.003"]))
    before = run(compose([*setup, *rest, *place(tmp_path, "none"), "train.lr=0"]))
    assert before["heldout_success"] < 0.65
    assert after["heldout_success"] > before["heldout_success"] + 0.2
