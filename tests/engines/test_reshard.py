"""Checkpoints of tensor parts and stages: shapes read each other's, and kills change no bit."""

from __future__ import annotations

import hashlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines import cells_world
from tests.engines.cells_world import BF16, Q8, real, size, steps, twin
from tests.engines.fsdp_world import run_world
from tests.engines.test_cells import BOTH, PARTS, STAGES, of_all
from tests.engines.test_parts import VOCAB, configured, made, same, train
from tests.engines.test_stages import Shape, staged
from tests.small_runs import contents, small
from tests.train.test_trainer import last_checkpoint, without_times
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Engine
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints
from zpp_lab.train import trainer

WHOLE: Shape = (1, 4, 1, 1)


def resharding(shape: Shape, name: str) -> Engine:
    """One model and recipe, whatever the shape, with codecs on wires that there are."""
    nodes, gpus, tp, pp = shape
    recipe: dict[str, Any] = {"stage": 2} | ({"grads": Q8} if size(shape) > tp * pp else {})
    recipe |= ({"acts_forward": Q8} if tp > 1 else {}) | ({"acts_pipe": Q8} if pp > 1 else {})
    more: dict[str, Any] = {"model": {"layers": 4}, "cluster": {"pp": pp}, "micro_steps": 4}
    more["engine"] = {"name": name} | ({"ordered": True} if name == "fsdp" else {})
    config = configured((nodes, gpus, tp), recipe, optimizer_state="bf16", **BF16, **more)
    return build_engine(config, VOCAB, torch.device("cpu"))


def hashes(folder: Path) -> dict[str, str]:
    return {n: hashlib.sha256(data).hexdigest() for n, data in contents(folder).items()}


def resharded(folder: str) -> dict[str, Any]:
    """Four ranks train, and each shape goes on from the files of the one before it without a step:
    whether first and last have the same files and all the same tensors, and steps from the last."""
    torch.use_deterministic_algorithms(True)
    stores, first = [], resharding(WHOLE, "fsdp")
    assert isinstance(first, FsdpEngine)
    steps(first, 0, 2)
    for i, shape in enumerate((WHOLE, PARTS, BOTH, WHOLE)):
        engine = resharding(shape, "fsdp") if i else first
        assert isinstance(engine, FsdpEngine)
        stores.append(Checkpoints(Path(folder) / str(i), 1, shared=True))
        if i:
            assert engine.load_checkpoint(Saved(stores[-2].path(2))) == 2
        stores[-1].save(2, engine.state_dict())
        stores[-1].wait()
        dist.barrier()
    paths = [store.path(2) for store in stores]
    states = [Saved(path).state() for path in paths]
    found = {
        "files": hashes(paths[0]) == hashes(paths[-1]) != {},
        "other files between": hashes(paths[0]) != hashes(paths[1]) != hashes(paths[2]),
        "tensors": all(same(states[0], state) for state in states[1:]),
        "steps": steps(first, 2, 4) == steps(engine, 2, 4),
    }
    return found | {"every rank": all(all(own.values()) for own in of_all(found))}


def test_shapes_reshard_each_others_files(tmp_path: Path) -> None:
    said = run_world(4, resharded, str(tmp_path))
    assert said == dict.fromkeys(said, True)


def test_one_process_writes_the_same_files_whatever_the_shape(tmp_path: Path) -> None:
    found, state = [], None
    for i, shape in enumerate((BOTH, WHOLE, PARTS, BOTH, WHOLE)):
        engine = resharding(shape, "virtual")
        assert isinstance(engine, VirtualEngine)
        if state is None:
            train(engine, 0, 2)
        else:
            engine.load_state_dict(state)
        store = Checkpoints(tmp_path / str(i), 1)
        store.save(2, engine.state_dict())
        store.wait()
        found.append(hashes(store.path(2)))
        state = Saved(store.path(2)).state()
    assert found == [found[0]] * len(found)
    assert found[0]


def written(folder: str, shape: Shape, case: str) -> dict[str, bool]:
    """What tensor parts or stages save: they resume from it, as the virtual engine does, and a
    whole model reads it. Each check by name."""
    torch.use_deterministic_algorithms(True)
    pp, more = shape[3], dict((cells_world.STAGES if shape[3] > 1 else cells_world.PARTS)[case][1])
    more.pop("engine", None)
    build = partial(staged, (1, 4, 1, 1)) if pp > 1 else partial(made, (1, 4, 1))
    first, model, whole = real(case, shape), build({}, **more), build({}, **more)
    store = Checkpoints(Path(folder), 2, shared=True)

    def saved(step: int) -> Saved:
        store.save(step, first.state_dict())
        store.wait()
        dist.barrier()
        return Saved(store.path(step))

    train(model, 0, 1)
    before = model.state_dict()
    first.load_state_dict(before)
    back = saved(1).state()
    found = {"the same tensors": same({k: back[k] for k in before}, before)}
    steps(first, 1, 3)
    read = saved(3)
    undisturbed, other, virtual = steps(first, 3, 5), real(case, shape), twin(case, shape)
    found["step"] = other.load_checkpoint(read) == 3
    virtual.load_state_dict(read.state())
    resumed = [steps(engine, 3, 5) for engine in (other, virtual)]
    found["goes on"] = resumed == [undisturbed, undisturbed]
    whole.load_state_dict(read.state())
    found["whole"] = same(whole.state_dict(), read.state())
    return found


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        (BOTH, "acts8"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((PARTS, "mixed"), (PARTS, "qwen2"), (STAGES, "interleaved"))
        ),
    ],
    ids=str,
)
def test_checkpoints_hold_whole_tensors_whatever_the_shape(
    shape: Shape, case: str, tmp_path: Path
) -> None:
    said = run_world(4, written, str(tmp_path), shape, case)
    assert said == dict.fromkeys(said, True)
    assert len(said) == 4


class Stopped:
    """An engine's steps, until a rank is killed in the middle of one."""

    def __init__(self, engine: Engine, rank: int, at: int) -> None:
        self.step, self.rank, self.at = engine.step, rank, at

    def __call__(self, step: int, *more: Any) -> Any:
        if step == self.at and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.step(step, *more)


def started(config: Config, killed_at: int | None) -> bool:
    """Whether the run ended; rank 1 of it is killed before that step."""
    build = trainer.build_engine

    def built(*args: Any) -> Any:
        engine = build(*args)
        if killed_at is not None:
            engine.step = Stopped(engine, 1, killed_at)  # type: ignore[method-assign]
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "build_engine", built)
        return trainer.run(config, dist.get_rank()).get("steps") == 12


KILLED = {
    "tensor parts": ["recipe.acts.bits=4", "recipe.acts.rounding=stochastic"],
    "both": [
        *("recipe.stage=2", "cluster.pp=2", "train.micro_steps=2", "model.layers=2"),
        *("recipe.acts.bits=8", "recipe.acts_pipe.rounding=stochastic"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLED)
def test_killed_ranks_resume_to_the_same_end(case: str, tmp_path: Path) -> None:
    shape = ["engine=fsdp", "engine.ordered=true", "cluster=1x4", "cluster.tp=2"]
    shape += ["recipe=zero3", "model.vocab_size=512", *KILLED[case]]
    whole, cut = (small(tmp_path, *shape, f"run.dir={tmp_path / n}") for n in ("whole", "cut"))
    assert run_world(4, started, whole, None)
    for at in (5, 8):
        with pytest.raises(AssertionError):
            run_world(4, started, cut, at)
        assert not (tmp_path / "cut" / "summary.json").exists()
    assert run_world(4, started, cut, None)
    assert last_checkpoint(tmp_path / "cut") == last_checkpoint(tmp_path / "whole")
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
