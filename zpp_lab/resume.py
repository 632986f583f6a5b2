"""Where a run's checkpoints go, and from which state it goes on."""

from __future__ import annotations

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
    """Go on from the run's own newest checkpoint, else begin with `run.start_from`'s state.

    Returns how many steps are done. ValueError for a checkpoint of weights only.
    """
    done = _load_newest(engine, store, device) if config.run.resume else None
    if done is None and config.run.start_from:
        _start_from(config, engine, Path(config.run.start_from))
    return done or 0


def _load_newest(engine: Engine, store: Store, device: torch.device) -> int | None:
    """Its step; None: there is no checkpoint."""
    if isinstance(store, ShardedCheckpoints):
        path = store.newest()
        if path is None:
            return None
        _check_resumes(not holds_weights_only(path), path)
        return cast("FsdpEngine", engine).load_checkpoint(path)
    state = store.load(device)
    if state is None:
        return None
    _check_resumes("optimizer" in state, store.folder)
    step = int(state.pop("step"))
    engine.load_state_dict(state)
    return step


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
        raise ValueError(
            f"{path} holds weights only (train.checkpoint_weights_only), from which no run can go "
            "on: start over with run.resume=false, or begin another run from it "
            "(model.start=CHECKPOINT)"
        )
