"""A branch: a run that begins with another one's weights and optimizer, and anneals by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from tests.runs.test_checkpoint import flip
from tests.small_runs import newest, small
from tests.train.test_trainer import last_checkpoint, without_times
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.config.study import ArmConfig, BranchConfig, PrepareConfig, StudyConfig
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.metrics import read
from zpp_lab.study.run.launch import Launch, run_study
from zpp_lab.study.run.plan import Planner, check_runs
from zpp_lab.train.trainer import run

ANNEAL = ["train.steps=4", "train.schedule=linear", "train.warmup_steps=0", "train.min_lr_ratio=0"]


def branch(folder: Path, name: str, *more: str, optimizer: bool = True, seed: int = 5) -> Config:
    start = [f"model.start={folder / 'run'}", f"model.start_optimizer={optimizer}".lower()]
    own = [f"seed={seed}", f"run.dir={folder / name}"]
    return small(folder, *start, *ANNEAL, *own, *more)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branches")
    run(small(folder, "train.schedule=constant", "recipe=zeropp"))
    return folder


def test_it_takes_the_state_and_anneals_over_its_own_steps(trunk: Path) -> None:
    run(branch(trunk, "with", "train.lr=0"))
    kept, there = (Saved(newest(trunk / name)).state() for name in ("with", "run"))
    before, after = (s["optimizer"]["step"]["norm.weight"] for s in (there, kept))
    assert (int(before), int(after)) == (12, 16), "its updates are counted on"
    assert all((kept["weights"][n] == w).all() for n, w in there["weights"].items())
    losses = {}
    for optimizer in (True, False):
        name = f"by_{optimizer}"
        run(branch(trunk, name, optimizer=optimizer))
        rows = list(read(trunk / name / "metrics.jsonl"))
        assert [row["lr"] for row in rows] == pytest.approx(
            [3e-3 * x for x in (1, 0.75, 0.5, 0.25)]
        )
        losses[optimizer] = [row["loss"] for row in rows]
    assert losses[True][0] == losses[False][0], "the same weights and batches"
    assert losses[True][1] != losses[False][1], "another step of them"


def test_it_repeats_to_the_bit_and_another_seed_reads_other_text(trunk: Path) -> None:
    for name, seed, cut in (("a", 5, ()), ("b", 5, ("run.piece_steps=2",)), ("c", 6, ())):
        for more in (cut, ()):
            run(branch(trunk, name, "recipe=w4", *more, seed=seed))
    assert last_checkpoint(trunk / "a") == last_checkpoint(trunk / "b")
    assert without_times(trunk / "a") == without_times(trunk / "b")
    first = {n: read(trunk / n / "metrics.jsonl")[0]["loss"] for n in "ac"}
    assert first["a"] != first["c"]


def on_ranks(config: Config) -> list[Any]:
    run(config, dist.get_rank())
    return [row["loss"] for row in read(Path(str(config.run.dir)) / "metrics.jsonl")]


def test_both_engines_branch_alike(trunk: Path) -> None:
    cluster = ["cluster=1x2", "recipe=zeropp", "recipe.secondary=false"]
    run(branch(trunk, "virtual", *cluster))
    real = ["engine=fsdp", "engine.ordered=true", "engine.device=cpu"]
    losses = run_world(2, on_ranks, branch(trunk, "fsdp", *cluster, *real))
    assert losses == [row["loss"] for row in read(trunk / "virtual" / "metrics.jsonl")]
    ours, theirs = (Saved(newest(trunk / name)).state() for name in ("virtual", "fsdp"))
    for kind in ("weights", *ours["optimizer"]):
        a, b = (s[kind] if kind == "weights" else s["optimizer"][kind] for s in (ours, theirs))
        assert a.keys() == b.keys()
        assert all((a[n] == b[n]).all() for n in a), kind


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.rope_theta=500", r"model.rope_theta 10000.0 there, 500.0 here"),
        ("model.ffn=32", r"model.ffn 24 there, 32 here"),
        ("train.beta2=0.99", r"train.beta2 0.95 there, 0.99 here"),
        ("train.beta2_tokens=1e6", r"train.beta2 0.95 there, 0.9999"),
        ("train.optimizer_state=8bit", r"train.optimizer_state 'fp32' there, '8bit' here"),
        ("run.start_from=x", r"run\.start_from"),
        ("model.start=null", r"model\.start"),
        ("model.lora.rank=2", r"model\.lora"),
    ],
)
def test_another_model_or_optimizer_is_refused(trunk: Path, words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(branch(trunk, "refused", words))


def test_where_a_run_begins_is_one_of_its_settings(trunk: Path) -> None:
    first, last = (str(path) for path in (trunk / "run" / "checkpoints").iterdir())
    own = f"run.dir={trunk / 'begun'}"
    run(small(trunk, own, f"run.start_from={last}"))
    for words in ([f"run.start_from={first}"], []):
        with pytest.raises(ValueError, match=r"run\.start_from"):
            run(small(trunk, own, *words))


def test_without_states_or_settings_it_is_refused(tmp_path: Path) -> None:
    run(small(tmp_path, "train.checkpoint_weights_only=true", "train.steps=3"))
    with pytest.raises(ValueError, match=r"step-0{7}3 .*start_optimizer"):
        run(branch(tmp_path, "light"))
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"config\.yaml"):
        run(branch(tmp_path, "unknown"))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    run(small(tmp_path, "train.steps=3"))
    flip(newest(tmp_path / "run"), "optimizer.exp_avg")
    with pytest.raises(ValueError, match=r"model\.start=.*step-00000003"):
        run(branch(tmp_path, "other"))


# ------------------------------------------------------------------------- of a study


def study(folder: Path, *overrides: str, seed: int = 0, **trunk: Any) -> StudyConfig:
    """`branch:` is one line of its file."""
    flat = small(folder)
    words = [f"data.path={flat.data.path}", f"data.cache_dir={flat.data.cache_dir}"]
    words += ["data=text", "data.seq_len=16", "data.heldout_every=2", "model.dim=16"]
    words += ["model.layers=1", "model.heads=2", "model.kv_heads=2", "model.ffn=24"]
    words += ["train.batch_size=2", "train.steps=6", "train.eval_tokens=1024", "engine.threads=1"]
    words += ["train.schedule=constant", "train.warmup_steps=2", "engine.device=cpu"]
    return StudyConfig(
        name="annealed",
        question="Does it hold?",
        arms=[ArmConfig("zero3", ["recipe=zero3"]), ArmConfig("w4", ["recipe=w4"])],
        seeds=[1, 2],
        overrides=[*words, "tracking.wandb=off", *overrides],
        prepare=[PrepareConfig("trunk", trunk.pop("words", []), seed)],
        branch=BranchConfig(3, **trunk),
    )


def test_a_study_branches_arms_and_orders_of_data_off_one_trunk(tmp_path: Path) -> None:
    what, root = study(tmp_path), tmp_path / "study"
    assert run_study(what, root, Launch(jobs=2)).exit_code == 0
    assert Saved(newest(root / "prepare" / "trunk")).step == 6
    firsts = set()
    for arm in ("zero3", "w4"):
        for seed in (1, 2):
            folder = root / arm / f"seed{seed}"
            rows = list(read(folder / "metrics.jsonl"))
            assert [row["lr"] for row in rows] == pytest.approx([3e-3, 2e-3, 1e-3])
            assert int(Saved(newest(folder)).state()["optimizer"]["step"]["norm.weight"]) == 9
            assert json.loads((folder / "summary.json").read_text())["steps"] == 3
            firsts.add(rows[0]["loss"])
    assert len(firsts) == 4, "other batches by seed, other weights on the wire by arm"
    assert len(run_study(what, root, Launch(jobs=2)).skipped) == 5


def test_what_a_trunk_cannot_give_is_refused_before_it_is_made(tmp_path: Path) -> None:
    def planned(what: StudyConfig) -> None:
        check_runs(what, Planner(what, tmp_path / "study", compose).first())

    planned(study(tmp_path))
    planned(study(tmp_path, words=["train.checkpoint_weights_only=true"], optimizer=False))
    with pytest.raises(ValueError, match=r"train\.checkpoint_weights_only"):
        planned(study(tmp_path, words=["train.checkpoint_weights_only=true"]))
    with pytest.raises(ValueError, match=r"train\.keep_checkpoints"):
        planned(study(tmp_path, "train.keep_checkpoints=0"))
    with pytest.raises(ValueError, match=r"zero3, w4: .*model\.layers"):
        planned(study(tmp_path, words=["model.layers=2"]))
    with pytest.raises(ValueError, match="seed"):
        study(tmp_path, seed=2)
    with pytest.raises(ValueError, match="prepare"):
        replace(study(tmp_path), prepare=[])


TWO_BITS = ["recipe=base", "recipe.name=two", "recipe.hops=2", "recipe.grads.bits=2"]
REMEMBERS = [*TWO_BITS, "recipe.grads.memory.kind=residual", "recipe.grads.memory.store=8bit"]


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remembering")
    run(small(folder, *REMEMBERS, "train.schedule=constant"))
    return folder


def test_a_killed_run_remembers(remembering: Path) -> None:
    pieces = f"run.dir={remembering / 'pieces'}"
    for more in ("run.piece_steps=5", "run.piece_steps=4", "run.piece_steps=0"):
        run(small(remembering, *REMEMBERS, "train.schedule=constant", pieces, more))
    assert last_checkpoint(remembering / "run") == last_checkpoint(remembering / "pieces")
    assert without_times(remembering / "run") == without_times(remembering / "pieces")
    kept = Saved(newest(remembering / "run")).memories()
    assert {name.split(".")[0] for name in kept} == {"grads_intra", "grads_inter"}


def first_losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read(folder / "metrics.jsonl")]


def test_a_branch_remembers_unless_it_is_told_not_to(
    remembering: Path, trunk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("keeps", []), ("drops", ["run.memory=drop"])):
        run(branch(remembering, name, *REMEMBERS, *more))
    assert "run.memory=drop: " in capsys.readouterr().err
    keeps, drops = (first_losses(remembering / name) for name in ("keeps", "drops"))
    assert keeps[0] == drops[0]
    assert keeps[1] != drops[1], "the first step's gradients were encoded with what was remembered"
    with pytest.raises(ValueError, match=r"run\.memory"):
        run(branch(remembering, "drops", *REMEMBERS))
    run(branch(remembering, "forgets", *TWO_BITS))  # neither needs nor has any
    run(branch(trunk, "begins", *REMEMBERS))
    assert Saved(newest(trunk / "begins")).memories()


def test_real_ranks_go_on_with_what_a_virtual_run_remembers(remembering: Path) -> None:
    run(branch(remembering, "virtual", *REMEMBERS))
    real = ["engine=fsdp", "engine.device=cpu"]
    losses = run_world(4, on_ranks, branch(remembering, "fsdp", *REMEMBERS, *real))
    assert losses == first_losses(remembering / "virtual")


@pytest.mark.parametrize("other", ["cluster=1x4", "recipe.grads.memory.store=bf16"])
def test_another_clusters_memories_are_not_taken(remembering: Path, other: str) -> None:
    with pytest.raises(ValueError, match=r"run\.memory=drop"):
        run(branch(remembering, f"refused-{len(other)}", *REMEMBERS, other))
    words = (*REMEMBERS, other, "run.memory=drop", "run.piece_steps=1")
    assert run(branch(remembering, f"dropped-{len(other)}", *words))["step"] == 1


def test_nothing_is_dropped_where_nothing_begins(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.memory=drop"):
        small(tmp_path, "run.memory=drop")
