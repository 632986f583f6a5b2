"""Checkpoints of adapters: bit-exact resume, other engines and worlds, another base refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from tests.models.lora.models import lora, on_base, save_base
from tests.runs.test_checkpoint import same
from tests.small_runs import newest, small
from tests.train.test_trainer import last_checkpoint, without_times
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_engine
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.tools.export import export_hf
from zpp_lab.train.trainer import run

STEPS = ["train.steps=6", "train.eval_every=3"]
RANKS = ["engine=fsdp", "engine.device=cpu", "engine.ordered=true", "engine.gather=hierarchical"]


def config_of(folder: Path, *more: str) -> Config:
    start = save_base(folder / "base", vocab=256)
    wires = ["recipe=zeropp", "recipe.hops=1", "train.param_dtype=bf16", "cluster=1x2"]
    return on_base(small(folder, *wires, *STEPS, *more), start, lora("q4"))


def into(config: Config, folder: Path) -> Config:
    return replace(config, run=replace(config.run, dir=str(folder)))


def cut_off(done: Path, cut: Path) -> None:
    """The run in `done` as if it had been killed after its checkpoint at step 3."""
    shutil.copytree(done, cut)
    (cut / "summary.json").unlink()
    (cut / "heldout.json").unlink()
    for path in (cut / "checkpoints").glob("step-00000006*"):
        shutil.rmtree(path)


@pytest.mark.slow  # the virtual engine's; real ranks are quick
def test_a_resumed_run_is_an_undisturbed_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    done = run(config)
    cut_off(tmp_path / "run", tmp_path / "cut")
    assert run(into(config, tmp_path / "cut"))["loss"] == done["loss"]
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "run")
    assert last_checkpoint(tmp_path / "cut") == last_checkpoint(tmp_path / "run")


def test_a_checkpoint_holds_no_base(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config)
    state = Saved(newest(tmp_path / "run")).state()
    assert all(n.endswith(("lora_A", "lora_B")) for n in state["weights"])
    assert all(m.dtype == torch.int64 and m.numel() <= 3 for m in state["base"].values())
    other = save_base(tmp_path / "other", vocab=256)
    changed = replace(config, model=replace(other, lora=config.model.lora))
    file = tmp_path / "other" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    engine = build_engine(changed, 256, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"\S+weight"):
        engine.load_state_dict(state)


# ---------------------------------------------------------------------- on ranks


def on_ranks(config: Config, folder: str) -> bool:
    """An undisturbed run, then one that goes on from its checkpoint at step 3."""
    torch.use_deterministic_algorithms(True)
    rank = dist.get_rank()
    run(config, rank)
    dist.barrier()
    if rank == 0:
        cut_off(Path(folder, "run"), Path(folder, "cut"))
    dist.barrier()
    run(into(config, Path(folder, "cut")), rank)
    return True


def test_ranks_resume_and_equal_the_virtual_engine(tmp_path: Path) -> None:
    config = config_of(tmp_path, *RANKS)
    assert run_world(2, partial(on_ranks, config, str(tmp_path)), seconds=300)
    undisturbed = without_times(tmp_path / "run")
    assert without_times(tmp_path / "cut") == undisturbed
    path = tmp_path / "run" / "checkpoints" / "step-00000006"
    resumed = Saved(tmp_path / "cut" / "checkpoints" / "step-00000006").state()
    assert same(resumed["weights"], Saved(path).state()["weights"])

    virtual = config_of(tmp_path, f"run.dir={tmp_path / 'virtual'}")
    run(virtual)
    errors = "telemetry"  # its sums are added in another order
    for there, here in zip(undisturbed, without_times(tmp_path / "virtual"), strict=True):
        assert {**there, errors: 0} == {**here, errors: 0}
    one = Saved(newest(tmp_path / "virtual")).state()
    several = Saved(path).state()
    assert all(torch.equal(one["base"][n], m) for n, m in several["base"].items())
    assert same(one["weights"], several["weights"])

    for name in ("run", "virtual"):
        export_hf(tmp_path / name, tmp_path / f"{name}_out")
    out = [(tmp_path / f"{n}_out" / "model.safetensors").read_bytes() for n in ("run", "virtual")]
    assert out[0] == out[1]

    three = replace(virtual, cluster=replace(config.cluster, gpus_per_node=3))
    engine = build_engine(three, 256, torch.device("cpu"))
    engine.load_state_dict(several)
    assert same(engine.state_dict()["weights"], several["weights"])
