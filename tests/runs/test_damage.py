"""A damaged state, or another run's, is named and passed over, whoever reads it on any rank."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from tests.runs.test_checkpoint import engine_of, shared, train
from tests.small_runs import contents, newest, small
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.runs.checkpoint.index import INDEX, index_text, open_index
from zpp_lab.runs.checkpoint.read import Ranks, open_saved
from zpp_lab.runs.checkpoint.read import newest as newest_of
from zpp_lab.runs.checkpoint.tensor_file import read_layout
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.tools.export import export_hf
from zpp_lab.train import trainer
from zpp_lab.train.resume import resume

MAIN = ["zeropp", "differences", "memory_loco"]  # plain, what nodes keep, what encoders remember
MORE = ["kept", "differences_sparse", "memory_second", "8bit_states", "stochastic"]
FSDP = load(Config, {"engine": {"name": "fsdp"}})


def flip(file: Path, start: str) -> bool:
    """Change one bit of a file's first tensor under `start`; whether there is one."""
    found = [place for name, place in read_layout(file).items() if name.startswith(start)]
    if not found:
        return False
    data = bytearray(file.read_bytes())
    data[found[0].start + found[0].nbytes // 2] ^= 1
    file.write_bytes(data)
    return True


def kinds_of(file: Path) -> list[str]:
    """What kinds of tensors are in a file: "weights.", "kept.", …"""
    return sorted({name.partition(".")[0] + "." for name in read_layout(file)})


def past_damage(folder: str, cases: list[str], ranks: list[int], world: int) -> dict[str, Any]:
    """Of every case, rank and kind of tensor: whether the state before is taken on all ranks, whose
    file was named, and whether training continues as it did undisturbed."""
    found = {}
    for case in cases:
        engine, root = engine_of(case, 2, world // 2), Path(folder) / case
        store = shared(str(root))
        for step in (1, 2):
            train(engine, step - 1, step)
            store.save(step, engine.state_dict())
        store.wait()
        undisturbed = None
        for rank in ranks:
            file = root / "step-00000002" / f"rank-{rank:05d}-0.safetensors"
            written = file.read_bytes()
            for kind in kinds_of(file):
                dist.barrier()
                if dist.get_rank() == 0:
                    assert flip(file, kind)
                dist.barrier()
                again, other = engine_of(case, 2, world // 2), shared(str(root))
                with redirect_stderr(io.StringIO()) as said:
                    step = resume(FSDP, again, other)
                results = train(again, step, 3)
                undisturbed = undisturbed or results
                every: list[Any] = [None] * world
                dist.all_gather_object(every, (step, results == undisturbed, said.getvalue()))
                named = [file.name in text for *_, text in every]
                found[f"{case} {rank} {kind}"] = [[e[:2] for e in every], named]
                dist.barrier()
                if dist.get_rank() == 0:
                    file.write_bytes(written)
        dist.barrier()
        whole = engine_of(case, 2, world // 2)
        assert resume(FSDP, whole, shared(str(root))) == 2
        assert train(whole, 2, 3)[-1] == undisturbed[-1]
    return found


def check_past_damage(found: dict[str, Any], world: int) -> None:
    for case, (every, named) in found.items():
        assert every == [[1, True]] * world, case
        assert named == [True] + [False] * (world - 1), case


def test_ranks_go_on_from_the_state_before_damage(tmp_path: Path) -> None:
    found = run_world(2, past_damage, str(tmp_path), MAIN, [1], 2, seconds=120)
    kinds = {key.split()[2] for key in found}
    assert kinds == {"weights.", "optimizer.", "kept.", "memory."}
    check_past_damage(found, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", MAIN + MORE)
def test_any_ranks_damage_in_any_recipe(tmp_path: Path, case: str) -> None:
    check_past_damage(run_world(4, past_damage, str(tmp_path), [case], [0, 1, 2, 3], 4), 4)


def without_a_whole_one(folder: str) -> list[str]:
    """What every rank raises when its only state, and a start's, is damaged in rank 1's file."""
    engine, root = engine_of("differences", 2, 1), Path(folder) / "run"
    store = shared(str(root / "checkpoints"))
    train(engine, 0, 1)
    store.save(1, engine.state_dict())
    store.wait()
    if dist.get_rank() == 0:
        for kind in ("weights.", "kept."):
            assert flip(store.path(1) / "rank-00001-0.safetensors", kind)
    dist.barrier()
    again, ranks, raised = engine_of("differences", 2, 1), Ranks(shared=True), []
    for job in (
        lambda: again.load_checkpoint(next(store.newest_first())),
        lambda: resume(FSDP, again, store),
        lambda: open_saved(store.path(1), ranks),
        lambda: newest_of(root, ranks),
    ):
        with redirect_stderr(io.StringIO()), pytest.raises(ValueError) as error:
            job()
        raised.append(type(error.value).__name__)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, raised)
    return [*every]


def test_ranks_agree_that_there_is_no_whole_state(tmp_path: Path) -> None:
    every = run_world(2, without_a_whole_one, str(tmp_path), seconds=120)
    assert every == [["DamagedError", "ValueError", "DamagedError", "ValueError"]] * 2


def test_exports_and_evaluations_take_the_newest_state_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differences = ["recipe=w4_diff", "train.keep_checkpoints=2", "train.param_dtype=bf16"]
    trainer.run(small(tmp_path, "cluster=2x2", *differences))
    run = tmp_path / "run"
    assert flip(newest(run) / "rank-00000-0.safetensors", "kept.")
    assert {row.step for row in evaluate([run])} == {9}
    assert export_hf(run, tmp_path / "out").step == 9
    assert "step-00000012" in capsys.readouterr().err
    branched = small(
        *(tmp_path, "cluster=2x2", *differences, f"run.dir={tmp_path / 'branch'}"),
        *(f"model.start={run}", "model.start_optimizer=true"),
    )
    trainer.run(branched)
    assert "step-00000012" in capsys.readouterr().err


# ------------------------------------------------------------------------- another run's


def piece(folder: Path, name: str, *settings: str, steps: int = 6) -> Path:
    """A run's first piece, which ends with a checkpoint."""
    run = folder / name
    trainer.run(small(folder, f"run.dir={run}", f"run.piece_steps={steps}", *settings))
    return run


def put_among(run: Path, other: Path, step: int = 6) -> None:
    """Another run's checkpoint in place of a run's own."""
    name = f"checkpoints/step-{step:08d}"
    shutil.rmtree(run / name, ignore_errors=True)
    shutil.copytree(other / name, run / name)


@pytest.mark.parametrize(
    "other",
    [
        "seed=2",
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("train.lr=0.1", "train.steps=14")),
    ],
)
def test_another_runs_state_is_passed_over(
    tmp_path: Path, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = "train.keep_checkpoints=3"
    trainer.run(small(tmp_path, keep, f"run.dir={tmp_path / 'undisturbed'}"))
    run = piece(tmp_path, "run", keep)
    put_among(run, piece(tmp_path, "other", keep, other))
    capsys.readouterr()
    trainer.run(small(tmp_path, keep))
    said = capsys.readouterr()
    assert "step-00000006" in said.err
    assert "step 3 of 12" in said.out
    there = contents(tmp_path / "undisturbed" / "checkpoints")
    assert contents(run / "checkpoints") == there


def test_without_a_state_of_its_own_a_run_is_refused(tmp_path: Path) -> None:
    run = piece(tmp_path, "run", steps=3)
    put_among(run, piece(tmp_path, "other", "seed=2", steps=3), step=3)
    with pytest.raises(ValueError, match=r"run\.resume=false"):
        trainer.run(small(tmp_path))
    with pytest.raises(ValueError, match="step-00000003"):
        evaluate([run])
    with pytest.raises(ValueError, match="step-00000003"):
        export_hf(run, tmp_path / "out")


def test_a_run_of_other_losses_is_another_run(tmp_path: Path) -> None:
    """Though its settings are the same: of another corpus, say, or another commit."""
    run = piece(tmp_path, "run", steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1]["loss"] += 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"run\.resume=false"):
        trainer.run(small(tmp_path))


def test_a_resume_names_what_it_cannot_read_of_its_data(tmp_path: Path) -> None:
    run = piece(tmp_path, "run", steps=3)
    for held in ("{}", '{"hash": 3, "tokenizer": "x", "vocab_size": 256}', "[]"):
        (run / "data.json").write_text(held)
        with pytest.raises(ValueError, match=r"data\.json"):
            trainer.run(small(tmp_path))
    (run / "data.json").unlink()  # as the error says
    assert trainer.run(small(tmp_path))["outcome"] == "finished"


def test_a_state_without_digests_is_taken(tmp_path: Path) -> None:
    """As older versions wrote it; where a run's files lie, and what changes no number, is free."""
    trainer.run(small(tmp_path, f"run.dir={tmp_path / 'undisturbed'}"))
    run = piece(tmp_path, "run")
    path = newest(run)
    index = open_index(path)
    assert index.origin is not None
    found = json.loads((path / INDEX).read_text())
    kinds = {name: (t["dtype"], tuple(t["shape"])) for name, t in found["tensors"].items()}
    held = {
        file: {name: (*e["rows"], e["sha256"]) for name, e in entries.items()}
        for file, entries in found["files"].items()
    }
    (path / INDEX).write_text(index_text(index.step, index.weights_only, kinds, held))
    assert open_index(path).origin is None
    free = ["train.keep_checkpoints=4", "tracking.telemetry_every=0", "train.checkpoint_every=5"]
    moved = shutil.move(run, tmp_path / "moved")
    end = trainer.run(small(tmp_path, f"run.dir={moved}", *free))
    before = json.loads((tmp_path / "undisturbed" / "summary.json").read_text())
    assert end["heldout_loss"] == before["heldout_loss"]


# ------------------------------------------------------------------------- whole commands


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w4_diff", "zeropp", "sdp4bit", "loco"])
@pytest.mark.parametrize("file", ["rank-00001-0.safetensors", "rank-00003-0.safetensors", INDEX])
def test_a_started_cluster_goes_on_past_damage(tmp_path: Path, recipe: str, file: str) -> None:
    settings = ["cluster=2x2", f"recipe={recipe}", "engine=fsdp", "engine.timeout_seconds=60"]
    config = small(tmp_path)
    words = [f"data.path={config.data.path}", f"data.cache_dir={config.data.cache_dir}"]
    words += ["data=text", "data.seq_len=16", "data.heldout_every=2", "model.dim=16"]
    words += ["model.layers=1", "model.heads=2", "model.kv_heads=2", "model.ffn=24"]
    words += ["train.batch_size=1", "train.steps=6", "train.checkpoint_every=2"]
    words += ["train.eval_tokens=256", "tracking.wandb=off", "engine.device=cpu", "run.dir=r"]

    def started(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zpp_lab.cli", "train", *settings, *words, *more]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
        )

    assert started("run.piece_steps=4").returncode == 75  # unfinished
    damaged = tmp_path / "r" / "checkpoints" / "step-00000004" / file
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    ended = started()
    assert ended.returncode == 0, ended.stderr
    assert "step-00000004" in ended.stderr
    assert (tmp_path / "r" / "summary.json").is_file()
