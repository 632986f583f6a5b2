"""Where a run's checkpoints go, and from which state it goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from zpp_lab.checkpoint import Checkpoints, SharedCheckpoints
from zpp_lab.config import Config
from zpp_lab.dcp import Saving, ShardedCheckpoints
from zpp_lab.dcp_read import holds_weights_only, read_whole
from zpp_lab.engines.base import Engine

if TYPE_CHECKING:
    from zpp_lab.engines.fsdp import FsdpEngine

Store = Checkpoints | ShardedCheckpoints


def open_store(config: Config, folder: Path, device: torch.device, rank: int) -> Store:
    """The checkpoints in `folder`, as the engine writes them."""
    train = config.train
    keep = max(1, train.keep_checkpoints)  # 0: none after the end
    skip = train.checkpoint_full_disk == "skip"
    if config.engine.name == "deepspeed":
        return SharedCheckpoints(folder, keep, rank, train.checkpoint_weights_only, skip)
    if config.engine.name != "fsdp":
        return Checkpoints(folder, keep, train.checkpoint_weights_only, skip)
    saving = Saving(
        int(train.checkpoint_host_gib * 2**30),
        train.checkpoint_staging_mib * 2**20,
        train.checkpoint_weights_only,
        skip,
    )
    where = "cpu" if config.engine.offload else str(device)
    return ShardedCheckpoints(folder, keep, saving, where)


def resume(config: Config, engine: Engine, store: Store, device: torch.device) -> int:
    """Go on from the run's own newest whole state, else begin with `run.start_from`'s state.

    Returns how many steps are done. Checkpoints of weights only are passed over, which is said;
    ValueError where there is no other.
    """
    done = _load_newest(engine, store, device) if config.run.resume else None
    if done is None and config.run.start_from:
        _start_from(config, engine, Path(config.run.start_from))
    return done or 0


def _load_newest(engine: Engine, store: Store, device: torch.device) -> int | None:
    """Its step; None: there is no checkpoint."""
    passed: Path | None = None  # the newest of those that hold weights only
    if isinstance(store, ShardedCheckpoints):
        for path in store.whole():
            if not holds_weights_only(path):
                _say_passed(passed, path, store.rank)
                return cast("FsdpEngine", engine).load_checkpoint(path)
            passed = passed or path
    else:
        for path, state in store.whole(device):
            if "optimizer" in state:
                _say_passed(passed, path, store.rank)
                step = int(state.pop("step"))
                engine.load_state_dict(state)
                return step
            passed = passed or path
            del state  # before the next one is read
    if passed is not None:
        raise _no_way_on(passed)
    return None


def _say_passed(passed: Path | None, path: Path, rank: int) -> None:
    """On rank 0: which steps are made again, and why."""
    if passed is not None and rank == 0:
        print(
            f"checkpoint {passed} holds weights only (train.checkpoint_weights_only); going on "
            f"from {path.name}, the newest whole state",
            file=sys.stderr,
        )


def _start_from(config: Config, engine: Engine, path: Path) -> None:
    """Weights and optimizer of any engine and cluster; steps count from 0."""
    if path.is_dir():
        _check_resumes(not holds_weights_only(path), path)
    if path.is_dir() and config.engine.name == "fsdp":
        cast("FsdpEngine", engine).load_checkpoint(path)
        return
    whole = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
    state = whole or read_whole(path)
    _check_resumes("optimizer" in state, path)
    engine.load_state_dict({"weights": state["weights"], "optimizer": state["optimizer"]})


def _check_resumes(whole: bool, path: Path) -> None:
    if not whole:
        raise _no_way_on(path)


def _no_way_on(path: Path) -> ValueError:
    return ValueError(
        f"{path} holds weights only (train.checkpoint_weights_only), from which no run can go "
        "on: start over with run.resume=false, or begin another run from it "
        "(model.start=CHECKPOINT)"
    )
