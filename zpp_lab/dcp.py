"""Checkpoints of a run on several ranks, through torch.distributed.checkpoint.

    checkpoints/step-00000100/
      __0_0.distcp, __1_0.distcp ...   each rank's shards
      .metadata                        where each piece of each tensor lies
      whole.json                       the step, and size and CRC-32 of every file

Ranks write into a folder under another name. When every file is on the disk, rank 0 adds
whole.json and renames the folder: a kill leaves the old checkpoints and never half a new one.
A folder whose files do not match whole.json is damaged, is named on stderr and passed over.
Tensors are found by name, so any number of ranks, or one process, can read them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from zpp_lab.files import sync_folder, write_atomic

MARKER = "whole.json"
State = dict[str, Any]  # "weights": {name: tensor}; "optimizer": {key: {name: tensor}}; "base"
_BASE = "base."


class ShardedCheckpoints:
    """The `keep` newest checkpoints of a run, in `folder`, which all ranks see.

    Every rank must make every call, with the same arguments but for its own shards.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")  # the writing thread's own
        self.writing: threading.Thread | None = None
        self.fault: Exception | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def saved(self) -> list[Path]:
        """Checkpoint folders, oldest first; some may be damaged."""
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def save(self, step: int, state: State) -> None:
        """Write the state after `step` steps. Returns when it is copied; a thread does the rest.

        OSError, here or in the next call, names the folder when the disk is full.
        """
        self.wait()
        partial = self.folder / f".partial-{step:08d}"
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        written = dcp.async_save(state, checkpoint_id=partial, process_group=self.group)
        self.writing = threading.Thread(
            target=self._finish, args=(step, partial, written), name="checkpoint", daemon=True
        )
        self.writing.start()

    def wait(self) -> None:
        """Until the last checkpoint is whole; OSError when it could not be written."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise OSError(
                f"could not write a checkpoint to {self.folder}: {fault}; free some space and "
                "start again"
            ) from fault

    def _finish(self, step: int, partial: Path, written: Any) -> None:
        try:
            written.result()
            self._seal(step, partial, self.path(step))
        except Exception as error:  # whatever it was, the training thread must hear of it
            self.fault = error

    def _seal(self, step: int, partial: Path, path: Path) -> None:
        """Put everything on the disk, write the marker, and give the folder its name."""
        own = [".metadata"] if self.rank == 0 else []
        own += [p.name for p in partial.glob(f"__{self.rank}_*.distcp")]
        sums: list[Any] = [None] * self.world
        flushed = {name: _flushed(partial / name) for name in own}
        dist.all_gather_object(sums, flushed, group=self.group)
        if self.rank == 0:
            files = {name: entry for part in sums for name, entry in sorted(part.items())}
            marker = {"step": step, "world": self.world, "files": files}
            write_atomic(partial / MARKER, json.dumps(marker, indent=1) + "\n")
            if path.exists():
                shutil.rmtree(path)
            partial.rename(path)
            sync_folder(self.folder)
            for old in self.saved()[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier(group=self.group)

    def newest(self) -> Path | None:
        """The newest whole checkpoint, the same on all ranks, each of which reads its part."""
        listed = [self.saved() if self.rank == 0 else None]
        dist.broadcast_object_list(listed)
        for path in reversed(listed[0] or []):
            faults: list[Any] = [None] * self.world
            dist.all_gather_object(faults, damage(path, self.rank, self.world))
            found = [f for f in faults if f]
            if not found:
                return path
            if self.rank == 0:
                print(
                    f"checkpoint {path} is damaged ({found[0]}); trying an older one",
                    file=sys.stderr,
                )
        return None


def _flushed(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file that is on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _sum(path)


def _sum(path: Path) -> tuple[int, int]:
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


def damage(path: Path, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with every `world`-th file of a checkpoint from `rank` on; None: nothing."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MARKER}: {error}"
    for name in sorted(files)[rank::world]:
        try:
            now = _sum(path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if list(now) != list(files[name]):
            return f"{name}: not the bytes that were written"
    return None


def saved_step(path: Path) -> int:
    return int(json.loads((path / MARKER).read_text())["step"])


def saved_names(path: Path) -> dict[str, torch.Size]:
    """Every saved tensor's dotted name and whole shape."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {n: m.size for n, m in metadata.items() if hasattr(m, "size")}


def read_into(path: Path, state: State) -> None:
    """Fill the tensors of `state`, sharded or whole, from a checkpoint. Its names must exist."""
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())


def read_tensor(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """One whole fp32 tensor of a checkpoint by its dotted name, on the CPU, for one process."""
    found = {name: torch.empty(shape)}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found[name]


def saved_marks(path: Path) -> dict[str, Tensor]:
    """The marks of the frozen base on which a checkpoint's adapters stand; none for most."""
    sizes = {n: size for n, size in saved_names(path).items() if n.startswith(_BASE)}
    found = {n: torch.empty(size, dtype=torch.int64) for n, size in sizes.items()}
    if found:
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return {n.removeprefix(_BASE): t for n, t in found.items()}


def read_whole(path: Path) -> State:
    """A checkpoint's whole tensors on the CPU: `step`, `weights`, `optimizer`, and `base` where
    adapters stand on one.

    For one process, or for every rank alike. ValueError when the checkpoint is damaged.
    """
    fault = damage(path)
    if fault:
        raise ValueError(f"{path} is damaged: {fault}; use another checkpoint")
    marks, sizes = saved_marks(path), saved_names(path)
    flat = {n: torch.empty(s) for n, s in sizes.items() if not n.startswith(_BASE)}
    dcp.load(flat, checkpoint_id=path, no_dist=True)
    state: State = {"step": saved_step(path), "weights": {}, "optimizer": {}}
    for dotted, tensor in flat.items():
        kind, _, name = dotted.partition(".")
        if kind == "weights":
            state["weights"][name] = tensor
        else:
            key, _, name = name.partition(".")
            state["optimizer"].setdefault(key, {})[name] = tensor
    return state | ({"base": marks} if marks else {})
