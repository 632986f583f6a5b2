"""The studies of size: what they promise, that they fit, and that their small twins run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.run.test_studies import config_of, study_of, tokens_of
from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.schema import Config
from zpp_lab.runs.metrics import read
from zpp_lab.study.run.launch import run_study
from zpp_lab.study.run.plan import Planner, differences
from zpp_lab.tools.plan.planner import Outlook, advise
from zpp_lab.train.launch.launcher import launch
from zpp_lab.train.memory.buffers import GIB

H200 = 139.8  # GiB
TWINS = {
    "pretrain_13b": "pretrain_13b_mini",
    "finetune_30b": "finetune_30b_mini",
    "pretrain_13b_x2": "pretrain_13b_x2_mini",
    "finetune_30b_x2": "finetune_30b_x2_mini",
}
SMALLER = (  # what a twin changes: sizes, the device, and the compiler
    "model.",
    "data.max_bytes",
    "data.vocab_size",
    "data.bpe_every",
    "data.seq_len",
    "data.tokenizer_path",
    "engine.compile",
    "engine.device",
    "engine.threads",
    "train.steps",
    "train.batch_size",
    "train.lr",
    "train.warmup_steps",
    "train.eval",
    "tracking.telemetry_every",
)


@pytest.mark.parametrize(("large", "small"), TWINS.items())
def test_a_twin_has_the_same_arms_and_path(large: str, small: str) -> None:
    assert study_of(large).arms == study_of(small).arms
    assert study_of(large).seeds == study_of(small).seeds
    changed = differences(config_of(large, "zero3"), config_of(small, "zero3"))
    assert not [key for key in changed if not key.startswith(SMALLER)]


def test_what_was_promised() -> None:
    pretrain, finetune, many = (
        config_of(name, "zero3") for name in ("pretrain_13b", "finetune_30b", "pretrain_350m")
    )
    assert (pretrain.model.dim, pretrain.model.layers) == (5120, 40)
    assert pretrain.train.steps >= 150
    assert tokens_of(pretrain) >= 150 * 16_384
    assert (finetune.model.dim, finetune.model.layers) == (6656, 60)
    assert finetune.train.steps >= 60
    assert (many.cluster.nodes, many.cluster.gpus_per_node) == (8, 8)
    assert tokens_of(many) >= 20_000_000
    assert len(study_of("pretrain_350m").seeds) >= 3
    assert len(study_of("pretrain_350m").arms) >= 5
    assert {c.train.reduce_dtype for c in (pretrain, finetune, many)} == {"bf16"}
    assert not pretrain.train.keep_checkpoints  # 156 GB that nobody will read


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


@pytest.mark.parametrize("study", ["pretrain_13b", "finetune_30b"])
def test_two_gpus_train_on_the_sequences_of_four(study: str) -> None:
    four, two = (config_of(name, "zero3") for name in (study, f"{study}_x2"))
    assert (two.cluster.nodes, two.cluster.gpus_per_node) == (2, 1)
    assert (two.data.draw_ranks, tokens_of(two)) == (four.cluster.world, tokens_of(four))
    free = ("cluster.", "data.draw_ranks", "train.batch_size", "train.optimizer_", "model.check")
    free += ("data.tokenizer_path", "train.eval_tokens", "model.start")
    assert not [key for key in differences(four, two) if not key.startswith(free)]


@pytest.mark.parametrize("size", ["", "_mini", "_x2", "_x2_mini"])
def test_finetuning_never_begins_from_random_weights(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the base that run.sh makes the study is refused, whoever starts it."""
    name = f"finetune_30b{size}"
    starts = {config_of(name, arm.name).model.start for arm in study_of(name).arms[:2]}
    assert starts == {f"runs/{name}_base"}
    monkeypatch.chdir(tmp_path)
    assert main(["study", name, "--arms", "w4", "--alone", "--dir", str(tmp_path / "out")]) == 2
    assert f"model.start=runs/{name}_base: no such" in capsys.readouterr().err


def test_every_arm_of_finetuning_may_have_bf16_moments(tmp_path: Path) -> None:
    """As the head of its run.sh says. Its two baselines are one then, each for its own arms."""
    study = load_study("finetune_30b", {}, ["train.optimizer_state=bf16"])
    runs = Planner(study, tmp_path, compose)
    assert {config.train.optimizer_state for config in runs._configs.values()} == {"bf16"}
    assert len(runs._configs) == len(study.arms) == 8


def test_on_four_gpus_real_ranks_train_the_base_of_the_simulated_ones() -> None:
    one, four = study_of("finetune_1b"), study_of("finetune_1b_x4")
    assert one.arms == four.arms
    assert one.overrides == four.overrides
    bases = [compose([*s.overrides, *s.prepare[0].overrides]) for s in (one, four)]
    assert differences(*bases).keys() == {"engine.name", "engine.ordered"}


@pytest.mark.parametrize(
    ("study", "arm", "gib"),
    [("pretrain_13b_x2", "zeropp", 104.1), ("finetune_30b_x2", "w2", 129.1)],
)
def test_two_gpus_hold_it_with_six_gib_to_spare(study: str, arm: str, gib: float) -> None:
    outlook = outlook_of(study, arm)
    assert outlook.estimate.peak / GIB == pytest.approx(gib, abs=0.3)  # what the pages say
    assert outlook.estimate.peak < outlook.device - 6 * GIB
    assert 2 * outlook.estimate.host < 128 * GIB  # of 256


def test_on_two_gpus_neither_fp32_moments_nor_8_bits_on_the_gpu_would_do() -> None:
    assert not outlook_of("pretrain_13b_x2", "zeropp", "train.optimizer_state=fp32").fits
    assert not outlook_of("finetune_30b_x2", "w2", "train.optimizer_place=device").fits


def test_hpz_at_30b_fits_by_what_the_plan_suggests() -> None:
    outlook = outlook_of("finetune_30b", "zeropp", "train.optimizer_state=fp32")
    assert not outlook.fits
    (advice,) = advise(outlook)
    assert advice.overrides == ("train.optimizer_state=bf16",)
    for arm in study_of("finetune_30b").arms:
        smaller = advice.overrides[0] in arm.overrides
        assert smaller == (arm.name in ("zero3_bf16", "zeropp"))


def small(name: str, arm: str, folder: Path, *more: str) -> Config:
    study = study_of(name)
    overrides = next(a.overrides for a in study.arms if a.name == arm)
    cache = f"data.cache_dir={folder / 'cache'}"
    return compose([*study.overrides, *overrides, cache, f"run.dir={folder / arm}", *more])


def test_the_twin_runs_as_a_study_and_equals_the_virtual_cluster(tmp_path: Path) -> None:
    """One arm over gloo through the study's queue, then the same ranks in this process."""
    study, arm = study_of("pretrain_13b_x2_mini"), "zeropp"
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    with_cache = type(study)(**{**study.__dict__, "overrides": [*study.overrides, cache]})
    outcome = run_study(with_cache, tmp_path / "study", arms=[arm])
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
    same = ("engine.name=virtual", "engine.gather=flat")
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
