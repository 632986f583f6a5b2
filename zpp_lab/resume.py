"""Where a run's checkpoints go, and from which state it goes on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from zpp_lab.checkpoint.index import DamagedError, check_format
from zpp_lab.checkpoint.read import Saved
from zpp_lab.checkpoint.write import Checkpoints, Saving
from zpp_lab.config import Config
from zpp_lab.engines.base import Engine

if TYPE_CHECKING:
    from zpp_lab.engines.fsdp import FsdpEngine


def open_store(config: Config, folder: Path, device: torch.device) -> Checkpoints:
    """The checkpoints in `folder`, as the engine writes them: of several processes all do."""
    train, engine = config.train, config.engine
    saving = Saving(
        int(train.checkpoint_host_gib * 2**30) if engine.name == "fsdp" else None,
        train.checkpoint_staging_mib * 2**20,
        train.checkpoint_weights_only,
        train.checkpoint_full_disk == "skip",
    )
    keep = max(1, train.keep_checkpoints)  # 0: none after the end
    on_host = engine.offload or engine.name == "deepspeed"
    where = "cpu" if on_host else device
    return Checkpoints(folder, keep, saving, engine.name in ("fsdp", "deepspeed"), where)


def resume(config: Config, engine: Engine, store: Checkpoints) -> int:
    """Go on from the run's own newest whole state, else begin with `run.start_from`'s state.

    Returns how many steps are done. Damaged checkpoints and those of weights only are passed over,
    which is said; ValueError where there is no other.
    """
    done = _load_newest(config, engine, store) if config.run.resume else None
    if done is None and config.run.start_from:
        _start_from(config, engine, store, Path(config.run.start_from))
    return done or 0


def _load_newest(config: Config, engine: Engine, store: Checkpoints) -> int | None:
    """Its step; None: there is no checkpoint."""
    passed: Path | None = None  # the newest of those that hold weights only
    for saved in store.newest_first():
        if saved.weights_only:
            passed = passed or saved.path
        elif store.checked(saved.path, partial(_load, config, engine, store, saved)):
            _say_passed(passed, saved.path, store.rank)
            store.prune(saved.path)  # a kill may have come before it
            return saved.step
    if passed is not None:
        raise _no_way_on(passed)
    if store.damaged:
        raise ValueError(
            f"{store.folder} has no whole checkpoint to go on from: restore one from a copy, or "
            "start over (run.resume=false)"
        )
    return None


def _load(config: Config, engine: Engine, store: Checkpoints, saved: Saved) -> bool:
    """Give the engine the state; DamagedError on all ranks where one of them finds damage."""
    if config.engine.name == "fsdp":
        store.ranks.all(lambda: cast("FsdpEngine", engine).load_checkpoint(saved))
    else:
        engine.load_state_dict(store.ranks.all(saved.state))
    return True


def _say_passed(passed: Path | None, path: Path, rank: int) -> None:
    """On rank 0: which steps are made again, and why."""
    if passed is not None and rank == 0:
        print(
            f"checkpoint {passed} holds weights only (train.checkpoint_weights_only); going on "
            f"from {path.name}, the newest whole state",
            file=sys.stderr,
        )


def _start_from(config: Config, engine: Engine, store: Checkpoints, path: Path) -> None:
    """Weights and optimizer of any engine and cluster; steps count from 0."""
    check_format(path)
    try:
        saved = store.ranks.all(lambda: Saved(path))
        if saved.weights_only:
            raise _no_way_on(path)
        _load(config, engine, store, saved)
    except DamagedError as error:
        raise ValueError(f"run.start_from: {error}; use another checkpoint") from None


def _no_way_on(path: Path) -> ValueError:
    return ValueError(
        f"{path} holds weights only (train.checkpoint_weights_only), from which no run can go "
        "on: start over with run.resume=false, or begin another run from it "
        "(model.start=CHECKPOINT)"
    )
