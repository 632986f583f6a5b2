"""Checkpoints that stream: the same bits back at any world, bounded memory, full disks."""

from __future__ import annotations

import io
import re
import resource
import shutil
import signal
from collections import namedtuple
from contextlib import redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from tests.runs.test_checkpoint import engine_of, same, train, virtual_of, whole
from tests.small_runs import contents, newest, small
from zpp_lab.codecs.planes import joined, split
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving, parts_of
from zpp_lab.tools.export import export_hf
from zpp_lab.train.trainer import run

STREAMED = Saving(host=0, staging=1000)  # pieces end inside rows and tensors
CASES = ["8bit_states", "split"]
MORE = ["bf16_states"]


def save_and_go_on(case: str, folder: Path, saving: Saving) -> list[list[float]]:
    engine = engine_of(case, 1, 2)
    checkpoints = Checkpoints(folder / case, 1, saving, shared=True)
    train(engine, 0, 3)
    checkpoints.save(3, engine.state_dict())
    results = train(engine, 3, 6)
    checkpoints.wait()
    return results


def every_way_on(folder: str, cases: list[str]) -> dict[str, list[Any]]:
    """Steps 3 to 6 of an undisturbed run, of one that resumed, of the virtual engine that went on
    from the real one's checkpoint, and of the real one that went on from the virtual one's."""
    found = {}
    for case in cases:
        undisturbed = save_and_go_on(case, Path(folder), STREAMED)
        path = Path(folder) / case / "step-00000003"
        again = engine_of(case, 1, 2)
        again.load_checkpoint(Saved(path))
        virtual, real = virtual_of(case, 1, 2), engine_of(case, 1, 2)
        virtual.load_state_dict(Saved(path).state())
        real.load_state_dict(virtual.state_dict())
        found[case] = [undisturbed] + [train(e, 3, 6) for e in (again, virtual, real)]
    return found


def on_three_ranks(folder: str, cases: list[str]) -> list[bool]:
    """Every tensor equals what one process reads, states to the bit."""
    found = []
    for case in cases:
        path = Path(folder) / case / "step-00000003"
        engine = engine_of(case, 1, 3)
        engine.load_checkpoint(Saved(path))
        found.append(same_bytes(whole(engine.state_dict()), Saved(path).state()))
    return found


def same_bytes(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and torch.equal(*bits)
    if isinstance(a, tuple):
        return all(map(same_bytes, a, b))
    return a.keys() == b.keys() and all(same_bytes(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("streamed")
    return folder, run_world(2, every_way_on, str(folder), CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_engine_goes_on_with_the_same_bits(streamed: Any, case: str) -> None:
    undisturbed, *others = streamed[1][case]
    assert [o == undisturbed for o in others] == [True] * 3


def test_another_world_has_the_same_states(streamed: Any) -> None:
    assert run_world(3, on_three_ranks, str(streamed[0]), CASES) == [True] * len(CASES)


@pytest.mark.slow
def test_other_states_in_every_engine_and_another_world(tmp_path: Path) -> None:
    for undisturbed, *others in run_world(2, every_way_on, str(tmp_path), MORE).values():
        assert [o == undisturbed for o in others] == [True] * 3
    assert run_world(3, on_three_ranks, str(tmp_path), MORE) == [True] * len(MORE)


def in_the_other_form(folder: str) -> list[bool]:
    """Masters of one piece are read as planes, and planes as one piece: streamed, by the tensor,
    and as the start of another run."""
    path, one = Path(folder) / "split" / "step-00000003", engine_of("zero3_bf16", 1, 2)
    planes = engine_of("split_fp32_states", 1, 2)
    store = Checkpoints(Path(folder) / "one", 1, STREAMED, shared=True)
    train(one, 0, 1)
    masters = dict(whole(one.state_dict())["weights"])
    for values in masters.values():  # at ties, too
        values.view(torch.int32).view(-1)[::3].bitwise_and_(-65536).bitwise_or_(0x8000)
    one.load_state_dict(whole(one.state_dict()) | {"weights": masters})
    store.save(1, one.state_dict())
    planes.load_checkpoint(Saved(store.path(1)))
    wanted = {n: split(t) for n, t in masters.items()}
    found = [same_bytes(wanted, paired(planes))]
    planes.load_checkpoint(Saved(path))
    saved = Saved(path)
    one.load_checkpoint(saved)
    values = {n: joined(*t) for n, t in paired(planes).items()}
    found.append(same_bytes(values, whole(one.state_dict())["weights"]))
    found.append(same_bytes(values, {n: saved.read(n) for n in values}))
    return found


def paired(engine: Any) -> dict[str, Any]:
    state = whole(engine.state_dict())
    return {n: (t, state["low"][n]) for n, t in state["weights"].items()}


def test_masters_are_read_in_either_form(streamed: Any) -> None:
    assert run_world(2, in_the_other_form, str(streamed[0])) == [True] * 3


# ---------------------------------------------------------------------- what goes wrong

Usage = namedtuple("Usage", "total used free")


def mistakes(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine, root = engine_of("zero3", 1, 2), Path(folder)
    train(engine, 0, 1)
    state = engine.state_dict()
    Checkpoints(root / "fp32", 1, STREAMED, shared=True).save(1, state)
    other = engine_of("8bit_states", 1, 2)
    found["other kind"] = raised(
        lambda: other.load_checkpoint(Saved(root / "fp32" / "step-00000001"))
    )
    for name, saving in {"streamed": STREAMED, "copied": Saving()}.items():
        found[f"full, {name}"] = on_full_disk(root / name, state, saving)
    found["late"] = late_fault(root / "late", state)
    light = Checkpoints(root / "light", 1, replace(STREAMED, weights_only=True), shared=True)
    light.save(1, state)
    path = light.path(1)
    rounded = {n: t.to(torch.bfloat16) for n, t in whole(state)["weights"].items()}
    kept = Saved(path)
    found["light"] = [same_bytes(rounded, kept.state()["weights"]), kept.states()]
    other.load_checkpoint(kept)
    there = whole(other.state_dict())["weights"]
    found["light loaded"] = same({n: t.float() for n, t in rounded.items()}, there)
    for name, host in (("streamed", 0), ("copied", 2**30)):
        piece = Checkpoints(root / "piece", 1, replace(light.saving, host=host), shared=True)
        piece.save(2, state, to_go_on=True)
        piece.wait()
        kept = Saved(piece.path(2))
        alike = same_bytes(whole(state), kept.state())
        found[f"piece, {name}"] = [alike, kept.weights_only, piece.took > 0]
    return found


def raised(job: Any) -> str:
    try:
        job()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_full_disk(folder: Path, state: Any, saving: Saving) -> list[Any]:
    """With each policy: what was raised, what was said, what is left behind."""
    found, real = [], shutil.disk_usage
    for skip in (False, True):
        checkpoints = Checkpoints(folder, 1, replace(saving, skip_full=skip), shared=True)
        shutil.disk_usage = lambda _: Usage(10**9, 10**9 - 12345, 12345)  # type: ignore[assignment]
        with redirect_stderr(io.StringIO()) as said:
            fault = raised(lambda c=checkpoints: (c.save(2, state), c.wait()))
        shutil.disk_usage = real
        dist.barrier()
        found.append([fault, said.getvalue(), sorted(p.name for p in folder.iterdir())])
    checkpoints.save(3, state)
    checkpoints.wait()
    return [*found, checkpoints.path(3).is_dir()]


def late_fault(folder: Path, state: Any) -> str:
    """The disk of one rank is full half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoints = Checkpoints(folder, 1, STREAMED, shared=True)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        return raised(lambda: checkpoints.save(2, state))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_mistakes_and_weights_alone(tmp_path: Path) -> None:
    found = run_world(2, mistakes, str(tmp_path))
    assert "in fp32, this run in 8bit: set train.optimizer_state=fp32" in found["other kind"]
    for name in ("streamed", "copied"):
        stopped, skipped, went_on = found[f"full, {name}"]
        assert stopped[0].startswith("OSError: could not write a checkpoint")
        assert "bytes" in stopped[0]
        assert "12,345 (0.00 GiB) are free" in stopped[0]
        assert skipped[0] == "nothing"
        assert "train.checkpoint_full_disk=skip" in skipped[1]
        assert stopped[2] == skipped[2] == [], "half a checkpoint would fill the disk"
        assert went_on
    assert re.search(r"File too large, and [\d,]+ bytes are needed; free", found["late"])
    assert not list((tmp_path / "late").iterdir())
    assert found["light"] == [True, {}]
    assert found["light loaded"]
    assert found["piece, streamed"] == found["piece, copied"] == [True, False, True]
    saved = Saved(tmp_path / "light" / "step-00000001")
    assert saved.read("embed.weight").dtype == torch.float32


# ---------------------------------------------------------------------- memory


def peak_while_saving(folder: str) -> dict[str, int]:
    """MiB of resident memory that a save of 256 MiB through 32 MiB adds."""
    state = {"weights": {f"w{i}": torch.full((2**23 + i,), float(i)) for i in range(8)}}
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    Checkpoints(Path(folder), 1, Saving(host=2**20, staging=2**25), shared=True).save(1, state)
    grown = resident("VmHWM") - before
    values = Saved(Path(folder) / "step-00000001").state()["weights"]
    assert all(torch.equal(state["weights"][n], values[n]) for n in values)
    return {"state": sum(p.nbytes for p in parts_of(state)) >> 20, "grown": grown}


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) >> 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_bounded_while_saving(tmp_path: Path) -> None:
    found = run_world(1, peak_while_saving, str(tmp_path))
    assert found["state"] == 256
    assert found["grown"] < 32 + 32
    assert len(list((tmp_path / "step-00000001").glob("rank-00000-*.safetensors"))) == 4


# ---------------------------------------------------------------------- whole runs


def test_a_run_with_weights_alone_is_exported_and_does_not_resume(tmp_path: Path) -> None:
    config = small(tmp_path, "train.checkpoint_weights_only=true", "train.optimizer_state=8bit")
    summary = run(config)
    assert summary["heldout_loss_master"] < 5.6
    if find_spec("safetensors"):
        assert export_hf(tmp_path / "run", tmp_path / "out", dtype="bf16").step == 12
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"run\.resume=false"):
        run(config)
    more = small(
        tmp_path, f"model.start={newest(tmp_path / 'run')}", f"run.dir={tmp_path / 'more'}"
    )
    assert run(more)["heldout_loss"] < summary["heldout_loss"]


@pytest.fixture(scope="module")
def plain_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    return float(run(small(tmp_path_factory.mktemp("plain"), "train.lr=0.02"))["heldout_loss"])


@pytest.mark.parametrize(
    "kind", ["8bit_states", pytest.param("bf16_states", marks=pytest.mark.slow)]
)
def test_runs_with_small_states_learn_and_resume(
    kind: str, tmp_path: Path, plain_loss: float
) -> None:
    small_states = f"train.optimizer_state={kind.split('_')[0]}"
    config = small(tmp_path, small_states, "train.lr=0.02")
    summary = run(config)
    assert summary["heldout_loss"] == pytest.approx(plain_loss, abs=0.02)
    end = contents(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(newest(tmp_path / "run"))
    assert run(config)["heldout_loss"] == summary["heldout_loss"]
    assert contents(tmp_path / "run" / "checkpoints") == end
    with pytest.raises(ValueError, match=r"train\.optimizer_state"):
        run(small(tmp_path, "train.lr=0.02"))
