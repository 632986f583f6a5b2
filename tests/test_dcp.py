"""Checkpoints of several ranks: bit-exact resume, other worlds, other engines, damage."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.fsdp_parity import configured
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch, build_uneven
from zpp_lab.dcp import ShardedCheckpoints
from zpp_lab.dcp_read import damage, read_whole, saved_step
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp import FsdpEngine
from zpp_lab.engines.virtual import VirtualEngine


def engine_of(case: str, nodes: int, local: int) -> FsdpEngine:
    model, config = build_uneven(), configured(case, nodes, local)
    return FsdpEngine(model, build_plan(model, config), config, torch.device("cpu"))


def virtual_of(case: str, nodes: int, local: int) -> VirtualEngine:
    model, config = build_uneven(), configured(case, nodes, local)
    return VirtualEngine(model, build_plan(model, config), config)


def train(engine: Any, first: int, last: int) -> list[list[float]]:
    """Loss and norm of each step."""
    results = [engine.step(s, 1e-2, partial(batch, s), telemetry=False) for s in range(first, last)]
    return [[r.loss, r.grad_norm] for r in results]


def save_and_go_on(folder: str) -> list[list[float]]:
    engine = engine_of("stochastic", 2, 2)
    checkpoints = ShardedCheckpoints(Path(folder), keep=2)
    for step in range(1, 5):
        train(engine, step - 1, step)
        checkpoints.save(step, engine.state_dict())
    results = train(engine, 4, 7)  # while the last one is being written
    checkpoints.wait()
    return results


def change_while_writing(folder: str) -> bool:
    """What is saved is the state at the call, whatever happens to the tensors afterwards."""
    engine = engine_of("zeropp", 1, 2)
    train(engine, 0, 1)
    before = {n: p.full_tensor().detach().clone() for n, p in engine.parameters.items()}
    checkpoints = ShardedCheckpoints(Path(folder), keep=2)
    checkpoints.save(1, engine.state_dict())
    with torch.no_grad():
        for p in engine.parameters.values():
            p.fill_(7.0)
    checkpoints.wait()
    return same(before, read_whole(checkpoints.path(1))["weights"])


def resume_noting(folder: str) -> list[Any]:
    """What was said on stderr, and the steps after the resume."""
    with redirect_stderr(io.StringIO()) as said:
        results = resume(folder)
    return [said.getvalue(), results]


def resume(folder: str) -> list[list[float]]:
    engine = engine_of("stochastic", 2, 2)
    newest = ShardedCheckpoints(Path(folder), keep=2).newest()
    assert newest is not None
    step = engine.load_checkpoint(newest)
    return train(engine, step, 7)


def on_other_world(folder: str) -> bool:
    """At world 2, every tensor equals what one process reads."""
    engine = engine_of("zeropp_bf16", 1, 2)
    newest = ShardedCheckpoints(Path(folder), keep=2).newest()
    assert newest is not None
    engine.load_checkpoint(newest)
    return same(whole(engine.state_dict()), read_whole(newest))


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))
    return all(same(a[k], b[k]) for k in a)


def from_virtual(folder: str, file: str) -> list[list[float]]:
    engine = engine_of("zeropp", 1, 2)
    engine.load_state_dict(torch.load(file, weights_only=True))
    return train(engine, 5, 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_world(4, save_and_go_on, str(folder))


def test_resume_is_bit_exact(saved: tuple[Path, list[list[float]]]) -> None:
    folder, undisturbed = saved
    assert [p.name for p in sorted(folder.iterdir())] == ["step-00000003", "step-00000004"]
    assert run_world(4, resume, str(folder)) == undisturbed


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    assert run_world(2, change_while_writing, str(tmp_path)) is True


def test_other_world_and_virtual_engine(saved: tuple[Path, list[list[float]]]) -> None:
    folder, undisturbed = saved
    assert run_world(2, on_other_world, str(folder)) is True
    engine = virtual_of("stochastic", 2, 2)
    path = folder / "step-00000004"
    engine.load_state_dict(read_whole(path))
    assert saved_step(path) == 4
    assert train(engine, 4, 7) == undisturbed


def test_virtual_state_in_the_real_engine(tmp_path: Path) -> None:
    engine = virtual_of("zeropp", 1, 2)
    train(engine, 0, 5)
    file = tmp_path / "virtual.pt"
    torch.save(engine.state_dict(), file)
    assert run_world(2, from_virtual, str(tmp_path), str(file)) == train(engine, 5, 8)


@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "no marker"])
def test_damage_is_seen(saved: tuple[Path, Any], tmp_path: Path, how: str) -> None:
    path = tmp_path / "step-00000004"
    shutil.copytree(saved[0] / "step-00000004", path)
    assert damage(path) is None
    file = path / "__2_0.distcp"
    data = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(data[:-1])
    elif how == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "missing":
        file.unlink()
    else:
        (path / "whole.json").unlink()
    assert damage(path)
    with pytest.raises(ValueError, match="damaged"):
        read_whole(path)


def test_the_newest_whole_one_is_used(
    saved: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    newest = tmp_path / "c" / "step-00000004" / "__1_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-7])
    (tmp_path / "c" / ".partial-00000005").mkdir()  # a kill in the middle of the next
    said, results = run_world(4, resume_noting, str(tmp_path / "c"))
    assert results[1:] == saved[1]
    assert "step-00000004 is damaged (__1_0.distcp" in said
