"""A run goes on from its newest whole state, past checkpoints that hold weights only."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from tests.runs.test_checkpoint import engine_of, same, train, whole
from tests.small_runs import small, tear
from tests.train.test_trainer import last_checkpoint, without_times
from zpp_lab.config.schema import Config
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving
from zpp_lab.runs.metrics import read
from zpp_lab.train import trainer
from zpp_lab.train.resume import resume

LIGHT = "train.checkpoint_weights_only=true"


class Killed(BaseException):
    """Nothing in a run expects it."""


def killed(config: Config, done: int) -> None:
    """A start of the run that ends after `done` steps, in the middle of the next one."""
    build = trainer.build_engine

    def built(*args: Any) -> Any:
        engine = build(*args)
        step = engine.step

        def stepped(at: int, *more: Any) -> Any:
            if at == done:
                raise Killed
            return step(at, *more)

        engine.step = stepped  # type: ignore[method-assign]
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "build_engine", built)
        with pytest.raises(Killed):
            trainer.run(config)


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return [int(p.stem.removeprefix("step-")) for p in sorted(folder.glob("checkpoints/step-*"))]


def state_at_4(folder: Path, *settings: str) -> None:
    """A first piece of a run that keeps weights alone: the whole state after step 4."""
    assert trainer.run(small(folder, LIGHT, *settings, "run.piece_steps=4"))["step"] == 4


def test_a_killed_run_goes_on_from_the_whole_state_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.run(small(tmp_path, LIGHT, f"run.dir={tmp_path / 'whole'}"))
    state_at_4(tmp_path)
    killed(small(tmp_path, LIGHT), 8)
    run = tmp_path / "run"
    assert kept(run) == [4, 6]
    assert len(read(run / "metrics.jsonl")) == 8
    capsys.readouterr()
    killed(small(tmp_path, LIGHT), 5)
    assert [row["step"] for row in read(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    said = capsys.readouterr()
    assert said.err.count("step-00000006 holds weights only (train.checkpoint_weights") == 1
    assert "resuming from step-00000004, the newest whole state" in said.err
    assert "resuming after step 4 of 12" in said.out
    assert trainer.run(small(tmp_path, LIGHT))["steps"] == 12
    assert kept(run) == [9, 12]
    assert last_checkpoint(run) == last_checkpoint(tmp_path / "whole")
    assert without_times(run) == without_times(tmp_path / "whole")


def test_what_a_former_start_left_costs_no_state_of_this_one(tmp_path: Path) -> None:
    """A later checkpoint of weights stays until its step comes again, and counts only then."""
    state_at_4(tmp_path)
    killed(small(tmp_path, LIGHT, "train.checkpoint_every=9"), 10)
    run = tmp_path / "run"
    assert kept(run) == [4, 9]
    killed(small(tmp_path, LIGHT), 8)
    assert kept(run) == [4, 6, 9]
    state = small(tmp_path, LIGHT, "train.keep_checkpoints=1", "run.piece_steps=3")
    assert trainer.run(state)["step"] == 7
    assert kept(run) == [7, 9]
    killed(small(tmp_path, LIGHT, "train.checkpoint_every=0"), 11)
    assert trainer.run(small(tmp_path, LIGHT))["steps"] == 12
    assert kept(run) == [9, 12]


@pytest.mark.parametrize("damaged", [False, True])
def test_without_a_whole_state_no_run_goes_on(
    tmp_path: Path, damaged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["train.keep_checkpoints=3"] if damaged else []
    state_at_4(tmp_path, *settings)
    killed(small(tmp_path, LIGHT, *settings), 10)
    files = tmp_path / "run" / "checkpoints"
    if damaged:
        tear(files / "step-00000004")
    with pytest.raises(ValueError, match=r"0009 .*run\.resume=false"):
        trainer.run(small(tmp_path, LIGHT, *settings))
    said = capsys.readouterr().err
    assert ("step-00000004 is damaged" in said) == damaged
    assert "resuming from" not in said
    assert "starts over" not in said
    assert kept(tmp_path / "run") == ([4, 6, 9] if damaged else [6, 9])
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 10


def of_ranks(folder: str) -> dict[str, Any]:
    """A whole state, then weights alone: what every rank goes on from, and what each said."""
    root, config = Path(folder), small(Path(folder) / str(dist.get_rank()), "engine=fsdp")
    store = Checkpoints(root, 3, Saving(weights_only=True), shared=True)
    engine = engine_of("zero3", 1, 2)
    train(engine, 0, 1)
    store.save(1, engine.state_dict(), to_go_on=True)
    store.wait()
    undisturbed = train(engine, 1, 3)
    for step in (2, 3):
        store.save(step, engine.state_dict())
    store.wait()
    other = engine_of("zero3", 1, 2)
    with redirect_stderr(io.StringIO()) as said:
        step = resume(config, other, store)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, said.getvalue())
    state = same(whole(other.state_dict()), {k: Saved(store.path(1)).state()[k] for k in KEYS})
    found = {"step": step, "said": every, "state": state}
    found["goes on"] = train(other, 1, 3) == undisturbed
    store.keep = 1
    store.save(2, other.state_dict(), to_go_on=True)
    store.wait()
    found["kept"] = kept(root.parent)
    store.save(3, other.state_dict())
    store.wait()
    with pytest.raises(ValueError, match="step-00000003"):
        resume(config, other, store)
    return found


KEYS = ("weights", "optimizer")


def test_ranks_go_on_from_the_same_whole_state(tmp_path: Path) -> None:
    for rank in "01":
        (tmp_path / "checkpoints" / rank).mkdir(parents=True)
    found = run_world(2, of_ranks, str(tmp_path / "checkpoints"))
    first, second = found.pop("said")
    assert found == {"step": 1, "state": True, "goes on": True, "kept": [2, 3]}
    assert first.count("step-00000003 holds weights only") == 1
    assert "resuming from step-00000001, the newest whole state" in first
    assert second == ""
