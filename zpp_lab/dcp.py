"""Checkpoints of a run on several ranks, written through torch.distributed.checkpoint.

    checkpoints/step-00000100/
      __0_0.distcp, __1_0.distcp ...   each rank's shards, up to four files a rank (`stream.py`)
      .metadata                        where each piece of each tensor lies
      whole.json                       the step, and size and CRC-32 of every file

Ranks write into a folder under another name. When every file is on the disk, rank 0 adds
whole.json and renames the folder: a kill leaves the old checkpoints and never half a new one.
A folder whose files do not match whole.json is damaged, is named on stderr and passed over.
`dcp_read.py` reads them.

Where every rank's part is small enough for a copy in host memory, training goes on while a thread
writes the copy. Else training waits while the tensors stream to the disk through staging memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zpp_lab.dcp_read import (
    MARKER,
    RAW,
    State,
    damage,
    marker_of,
    size_and_crc,
)
from zpp_lab.files import is_full, say_damaged, say_none_whole, sync_folder, write_atomic
from zpp_lab.stream import CastPlanner, HostCopy, StreamWriter, local_bytes


@dataclass(frozen=True)
class Saving:
    """How checkpoints are written: the settings of `train.checkpoint_*`, in bytes.

    host: the largest part of a rank that is copied; staging: memory of a rank's pieces on their
    way; weights_only: weights alone, in bf16; skip_full: a full disk costs the checkpoint only.
    """

    host: int = 2**33
    staging: int = 2**30
    weights_only: bool = False
    skip_full: bool = False


class ShardedCheckpoints:
    """The `keep` newest checkpoints of a run, in `folder`, which all ranks see.

    Every rank must make every call, with the same arguments but for its own shards. `device` is
    where the tensors are. `took`: seconds of the longest write so far, on this rank.
    """

    def __init__(
        self, folder: Path, keep: int, saving: Saving | None = None, device: str = "cpu"
    ) -> None:
        self.folder, self.keep, self.saving = folder, keep, saving or Saving()
        self.device = torch.device(device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")  # the writing thread's own
        self.copy, self.took = HostCopy(), 0.0
        self.writing: threading.Thread | None = None
        self.fault: BaseException | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def saved(self) -> list[Path]:
        """Checkpoint folders, oldest first; some may be damaged."""
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def save(self, step: int, state: State, to_go_on: bool = False) -> None:
        """Write the state after `step` steps. Returns when the tensors may change: copied, and a
        thread does the rest, or streamed to the disk. `to_go_on`: the whole state, where usually
        weights alone are saved.

        OSError, here or in the next call, names the folder, and the bytes when the disk is full.
        """
        self.wait()
        light = self.saving.weights_only and not to_go_on
        if light:
            state = {"weights": state["weights"]}
        partial = self.folder / f".partial-{step:08d}"
        if self.rank == 0:
            for left in self.folder.glob(".partial-*"):  # by a kill
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        if self._most(local_bytes(state)) <= self.saving.host:
            self.writing = threading.Thread(
                target=self._write,
                args=(step, partial, self.copy.take(state), torch.device("cpu"), light),
                name="checkpoint",
                daemon=True,
            )
            self.writing.start()
        else:
            began = time.perf_counter()
            self._write(step, partial, state, self.device, light)
            self._say_waited(step, time.perf_counter() - began)
            self.wait()

    def _most(self, nbytes: int) -> int:
        """The largest of all ranks' parts."""
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, nbytes, group=self.group)
        return int(max(parts))

    def _say_waited(self, step: int, seconds: float) -> None:
        if self.rank or self.fault is not None:
            return
        size = sum(entry[0] for entry in marker_of(self.path(step))["files"].values())
        print(
            f"checkpoint of step {step}: training waited {seconds:.1f} s while {size / 2**30:.2f} "
            f"GiB were written; a copy would have taken more than "
            f"train.checkpoint_host_gib={self.saving.host / 2**30:g} of a rank's host memory",
            file=sys.stderr,
        )

    def wait(self) -> None:
        """Until the last checkpoint is whole; OSError when it could not be written, unless it is
        to be skipped when the disk is full."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None
        if self.fault is None:
            return
        fault, self.fault = self.fault, None
        text = f"could not write a checkpoint to {self.folder}: {fault}"
        if not (self.saving.skip_full and is_full(fault)):
            raise OSError(
                f"{text}; free some space and start again, keep fewer or smaller ones "
                "(train.keep_checkpoints, train.optimizer_state, train.checkpoint_weights_only), "
                "or train on without them (train.checkpoint_full_disk=skip)"
                if is_full(fault)
                else text
            ) from fault
        if self.rank == 0:
            print(f"{text}; training goes on (train.checkpoint_full_disk=skip)", file=sys.stderr)

    def _write(
        self, step: int, partial: Path, state: State, device: torch.device, light: bool
    ) -> None:
        """Write and seal; `fault` keeps what went wrong, alike on all ranks. `light`: in bf16."""
        began = time.monotonic()
        writer = StreamWriter(partial, self.saving.staging, device)
        planner = CastPlanner(torch.bfloat16) if light else None
        try:
            dcp.save(state, storage_writer=writer, planner=planner, process_group=self.group)
            self._seal(step, partial, writer.sums, light)
            self.took = max(self.took, time.monotonic() - began)
        except (Exception, dcp.CheckpointException) as error:  # the training thread must hear
            self.fault = _cause(error)
            if self.rank == 0:  # nobody writes any more, and the space may be needed
                shutil.rmtree(partial, ignore_errors=True)

    def _seal(
        self, step: int, partial: Path, sums: dict[str, tuple[int, int]], light: bool
    ) -> None:
        """Write the marker, and give the folder its name."""
        path, every = self.path(step), [None] * self.world
        dist.all_gather_object(every, sums, group=self.group)
        fault: list[BaseException | None] = [None]
        if self.rank == 0:
            try:
                self._finish(step, partial, path, every, light)
            except OSError as error:
                fault = [error]
        dist.broadcast_object_list(fault, group=self.group)
        if fault[0] is not None:
            raise fault[0]

    def _finish(self, step: int, partial: Path, path: Path, sums: list[Any], light: bool) -> None:
        files = {name: entry for part in sums for name, entry in sorted(part.items())}
        files[".metadata"] = _flushed(partial / ".metadata")
        marker = {
            "step": step,
            "world": self.world,
            "format": RAW,
            "weights_only": light,
            "files": files,
        }
        write_atomic(partial / MARKER, json.dumps(marker, indent=1) + "\n")
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        sync_folder(self.folder)
        # later ones are those of a former start that this one has gone back behind
        for old in [p for p in self.saved() if p <= path][: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def newest(self) -> Path | None:
        """The newest whole checkpoint, the same on all ranks, each of which reads its part."""
        return next(self.whole(), None)

    def whole(self) -> Iterator[Path]:
        """Every whole checkpoint, the newest first, looked at when it is asked for. Damaged ones
        are named on stderr and passed over."""
        listed = [self.saved() if self.rank == 0 else None]
        dist.broadcast_object_list(listed)
        any_whole = False
        for path in reversed(listed[0] or []):
            faults: list[Any] = [None] * self.world
            dist.all_gather_object(faults, damage(path, self.rank, self.world))
            found = [f for f in faults if f]
            if not found:
                any_whole = True
                yield path
            elif self.rank == 0:
                say_damaged(path, found[0])
        if self.rank == 0 and not any_whole:
            say_none_whole(self.folder, listed[0] or [])


def _cause(error: BaseException) -> BaseException:
    """What one rank met, out of torch's report of all ranks."""
    if isinstance(error, dcp.CheckpointException):
        return next((failure[0] for _, failure in sorted(error.failures.items())), error)
    return error


def _flushed(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file that is on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return size_and_crc(path)
