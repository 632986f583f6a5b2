"""Checkpoints: one format, read by every engine on any number of ranks; every byte is checked."""

from __future__ import annotations

import io
import random
import re
import shutil
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.engines.fsdp_parity import configured
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch, build_uneven
from tests.small_runs import contents, newest, small, tensor_file
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.runs.checkpoint.index import DamagedError
from zpp_lab.runs.checkpoint.read import Ranks, Saved, flat, open_saved
from zpp_lab.runs.checkpoint.tensor_file import read_layout
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving
from zpp_lab.tools.export import export_hf
from zpp_lab.train.resume import resume as resume_run
from zpp_lab.train.trainer import run


def engine_of(case: str, nodes: int, local: int, **engine: Any) -> FsdpEngine:
    model, config = build_uneven(), configured(case, nodes, local, **engine)
    return FsdpEngine(model, build_plan(model, config), config, torch.device("cpu"))


def virtual_of(case: str, nodes: int, local: int) -> VirtualEngine:
    model, config = build_uneven(), configured(case, nodes, local)
    return VirtualEngine(model, build_plan(model, config), config)


def written(folder: Path, step: int, engine: VirtualEngine) -> None:
    Checkpoints(folder, 1, Saving(host=None)).save(step, engine.state_dict())


def shared(folder: str, keep: int = 2) -> Checkpoints:
    return Checkpoints(Path(folder), keep, shared=True)


def train(engine: Any, first: int, last: int) -> list[list[float]]:
    """Loss and norm of each step."""
    results = [engine.step(s, 1e-2, partial(batch, s), telemetry=False) for s in range(first, last)]
    return [[r.loss, r.grad_norm] for r in results]


def save_and_go_on(folder: str) -> list[list[float]]:
    engine = engine_of("stochastic", 2, 2)
    checkpoints = shared(folder)
    for step in range(1, 5):
        train(engine, step - 1, step)
        checkpoints.save(step, engine.state_dict())
    results = train(engine, 4, 6)  # while the last one is being written
    checkpoints.wait()
    return results


def change_while_writing(folder: str) -> bool:
    """What is saved is the state at the call, whatever happens to the tensors afterwards."""
    engine = engine_of("zeropp", 1, 2)
    train(engine, 0, 1)
    before = {n: p.full_tensor().detach().clone() for n, p in engine.parameters.items()}
    checkpoints = shared(folder)
    checkpoints.save(1, engine.state_dict())
    with torch.no_grad():
        for p in engine.parameters.values():
            p.fill_(7.0)
    checkpoints.wait()
    return same(before, Saved(checkpoints.path(1)).state()["weights"])


def resume_noting(folder: str) -> list[Any]:
    """What was said on stderr, and the steps after the resume."""
    with redirect_stderr(io.StringIO()) as said:
        results = resume(folder)
    return [said.getvalue(), results]


def resume(folder: str) -> list[list[float]]:
    engine, checkpoints = engine_of("stochastic", 2, 2), shared(folder)
    config = load(Config, {"engine": {"name": "fsdp"}})
    return train(engine, resume_run(config, engine, checkpoints), 6)


def on_other_world(folder: str) -> bool:
    """At world 2, every tensor equals what one process reads."""
    engine = engine_of("zeropp_bf16", 1, 2)
    newest = next(shared(folder).newest_first())
    engine.load_checkpoint(newest)
    return same(whole(engine.state_dict()), newest.state())


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    if not hasattr(state, "full_tensor"):
        return state
    if state.dtype == torch.int16:  # gloo does not send them
        return state.to(torch.int32).full_tensor().to(torch.int16)
    return state.full_tensor()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))
    return all(same(a[k], b[k]) for k in a)


def from_virtual(folder: str) -> list[list[float]]:
    engine = engine_of("zeropp", 1, 2)
    step = engine.load_checkpoint(next(shared(folder).newest_first()))
    return train(engine, step, 7)


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
    engine.load_state_dict(Saved(path).state())
    assert Saved(path).step == 4
    assert train(engine, 4, 6) == undisturbed


def test_virtual_state_in_the_real_engine(tmp_path: Path) -> None:
    engine = virtual_of("zeropp", 1, 2)
    train(engine, 0, 5)
    written(tmp_path, 5, engine)
    assert run_world(2, from_virtual, str(tmp_path)) == train(engine, 5, 7)


@pytest.mark.slow
def test_the_same_state_is_the_same_bytes(
    saved: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    """File by file, in whatever folder; neither time nor place enters."""
    run_world(4, save_and_go_on, str(tmp_path / "elsewhere"))
    assert contents(tmp_path / "elsewhere") == contents(saved[0])


# ---------------------------------------------------------------------- the files


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the virtual engine, moments in 8 bits."""
    folder, engine = tmp_path_factory.mktemp("alone"), virtual_of("8bit_states", 1, 2)
    train(engine, 0, 2)
    written(folder, 2, engine)
    return folder / "step-00000002"


@pytest.fixture(params=["virtual", "fsdp"])
def checkpoint(request: pytest.FixtureRequest, alone: Path, saved: Any, tmp_path: Path) -> Path:
    """A copy of a checkpoint of each engine."""
    there = alone if request.param == "virtual" else saved[0] / "step-00000004"
    return Path(shutil.copytree(there, tmp_path / there.name))


def test_other_tools_read_the_files(checkpoint: Path) -> None:
    rows: dict[str, list[Tensor]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, part in load_file(file).items():
            rows.setdefault(name, []).append(part)
    whole = {n: torch.cat(parts) if parts[0].ndim else parts[0] for n, parts in rows.items()}
    state = dict(flat(Saved(checkpoint).state()))
    assert state.keys() == whole.keys()
    for name, tensor in state.items():
        assert tensor.dtype == whole[name].dtype
        assert torch.equal(
            tensor.view(-1).view(torch.uint8), whole[name].view(-1).view(torch.uint8)
        )


def test_no_flipped_byte_is_taken(checkpoint: Path) -> None:
    """At random places of every file, and at each file's ends."""
    rng = random.Random(0)
    Saved(checkpoint).state()
    for file in sorted(checkpoint.iterdir()):
        written = file.read_bytes()
        places = {0, 7, len(written) - 1, *(rng.randrange(len(written)) for _ in range(12))}
        for at in sorted(places):
            data = bytearray(written)
            data[at] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            with pytest.raises(DamagedError, match=re.escape(file.name)):
                Saved(checkpoint).state()
            with pytest.raises(DamagedError, match=re.escape(file.name)):
                Saved(checkpoint).check()
        file.write_bytes(written)
    Saved(checkpoint).state()


@pytest.mark.parametrize("how", ["cut", "longer", "missing"])
def test_a_damaged_file_is_named(checkpoint: Path, how: str) -> None:
    for file in sorted(checkpoint.iterdir()):
        written = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(written[:-1] if how == "cut" else written + b"\0")
        with pytest.raises(DamagedError, match=rf"{re.escape(file.name)}: ") as said:
            Saved(checkpoint)
        assert "\n" not in str(said.value)
        file.write_bytes(written)


@pytest.mark.parametrize("older", ["step-00000003.pt", "step-00000003/whole.json"])
def test_older_checkpoints_name_the_commit_that_reads_them(tmp_path: Path, older: str) -> None:
    file = tmp_path / "run" / "checkpoints" / older
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    path = tmp_path / "run" / "checkpoints" / older.partition("/")[0]
    for read in (lambda: open_saved(path), lambda: open_saved(tmp_path / "run")):
        with pytest.raises(ValueError, match="19cf7c4"):
            read()
    with pytest.raises(ValueError, match="19cf7c4"):
        run(small(tmp_path))
    with pytest.raises(ValueError, match="19cf7c4"):
        run(small(tmp_path, f"run.start_from={path}", f"run.dir={tmp_path / 'other'}"))


# ---------------------------------------------------------------------- what goes on


def flip(checkpoint: Path, part: str) -> None:
    """One bit in the middle of the tensors of `part` in a checkpoint's first file."""
    file = tensor_file(checkpoint)
    place = next(p for n, p in read_layout(file).items() if n.startswith(part))
    data = bytearray(file.read_bytes())
    data[place.start + place.nbytes // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "part", ["weights.", pytest.param("optimizer.exp_avg", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_from_the_state_before_a_flip(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    run(config)
    folder = tmp_path / "run"
    before = contents(folder / "checkpoints")
    (folder / "summary.json").unlink()
    flip(newest(folder), part)
    assert run(config)["steps"] == 12
    said = capsys.readouterr()
    assert re.search(rf"step-00000012 is damaged \(rank-\S+: {part}.*\); trying an older", said.err)
    assert "resuming after step 9 of 12" in said.out
    assert contents(folder / "checkpoints") == before


def test_a_kill_before_old_ones_are_removed_leaves_none_behind(tmp_path: Path) -> None:
    config = small(tmp_path)
    run(config)
    folder, there = tmp_path / "run", contents(tmp_path / "run" / "checkpoints")
    (folder / "summary.json").unlink()
    shutil.copytree(newest(folder), folder / "checkpoints" / "step-00000006")
    shutil.copytree(newest(folder), folder / "checkpoints" / ".partial-00000015")
    run(config)
    assert contents(folder / "checkpoints") == there


def newest_of(run: str) -> tuple[int, str]:
    """The step, and what all ranks said."""
    with redirect_stderr(io.StringIO()) as said:
        step = open_saved(Path(run), Ranks(shared=True)).step
    every = [""] * dist.get_world_size()
    dist.all_gather_object(every, said.getvalue())
    return step, "".join(every)


def test_a_start_takes_an_older_checkpoint_where_the_newest_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(tmp_path, "train.keep_checkpoints=2"))
    flip(newest(tmp_path / "run"), "weights.")
    start, older = f"model.start={tmp_path / 'run'}", "step-00000009"
    losses = []
    for source in (start, f"{start}/checkpoints/{older}"):
        summary = run(small(tmp_path, source, f"run.dir={tmp_path / f'to{len(losses)}'}"))
        losses.append(summary["heldout_loss"])
    said = r"step-00000012 is damaged \(rank-\S+: weights.*\); trying an older one"
    assert len(re.findall(said, capsys.readouterr().err)) == 1
    assert losses[0] == losses[1]
    step, told = run_world(2, newest_of, str(tmp_path / "run"))
    assert (step, len(re.findall(said, told))) == (9, 1)  # of rank 0, whoever found it
    with pytest.raises(ValueError, match=r"model\.start=\S+/step-00000012: "):
        run(small(tmp_path, f"{start}/checkpoints/step-00000012", f"run.dir={tmp_path / 'no'}"))


def test_nothing_else_takes_a_flip_either(tmp_path: Path) -> None:
    config = small(tmp_path, "train.keep_checkpoints=1")
    run(config)
    flip(newest(tmp_path / "run"), "weights.")
    path, other = newest(tmp_path / "run"), f"run.dir={tmp_path / 'other'}"
    for start in (
        f"model.start={path}",
        f"model.start={path.parents[1]}",
        f"run.start_from={path}",
    ):
        with pytest.raises(ValueError, match=r"step-00000012 .*rank-00000-0\..*weights"):
            run(small(tmp_path, start, other))
    with pytest.raises(ValueError, match="step-00000012"):
        export_hf(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"run\.resume=false"):
        run(config)
    assert run(small(tmp_path, "train.keep_checkpoints=1", "run.resume=false"))["steps"] == 12


def test_host_memory_is_copied_once_a_gpu_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments come before the weights, whose copy would wait for the GPU."""
    moments = torch.zeros(3, 5)
    store = Checkpoints(tmp_path, 1, device="cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: moments.fill_(7))
    store.save(1, {"optimizer": {"exp_avg": {"a": moments}}, "weights": {"a": torch.ones(3, 5)}})
    store.wait()
    assert (Saved(store.path(1)).state()["optimizer"]["exp_avg"]["a"] == 7).all()


def test_the_newest_whole_one_is_used(
    saved: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    """One rank alone reads what is damaged; all of them go back."""
    shutil.copytree(saved[0], tmp_path / "c")
    file = tmp_path / "c" / "step-00000004" / "rank-00001-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    (tmp_path / "c" / ".partial-00000005").mkdir()  # a kill in the middle of the next
    said, results = run_world(4, resume_noting, str(tmp_path / "c"))
    assert results[1:] == saved[1]
    assert "step-00000004 is damaged (rank-00001-0.safetensors: weights." in said
    assert not list((tmp_path / "c").glob(".partial*"))
