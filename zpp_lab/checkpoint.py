"""Checkpoints of a run: atomic, the newest whole one wins.

A file is written beside its place, flushed to disk and renamed, so that a kill leaves the old
or the new file and never half of one. The same state always gives the same bytes.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zpp_lab.files import is_full, need_space, say_damaged, say_none_whole, sync_folder


class Checkpoints:
    """The `keep` newest checkpoints of a run, in `folder`.

    weights_only: weights alone, in bf16; skip_full: a full disk costs the checkpoint only.
    `took`: seconds of the longest write so far.
    """

    rank = 0

    def __init__(
        self, folder: Path, keep: int, weights_only: bool = False, skip_full: bool = False
    ) -> None:
        self.folder, self.keep = folder, keep
        self.weights_only, self.skip_full = weights_only, skip_full
        self.took = 0.0

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def save(self, step: int, state: dict[str, Any], to_go_on: bool = False) -> Path | None:
        """Write the state after `step` steps; OSError says which file when the disk is full, or
        with `skip_full` stderr does, and None is returned. `to_go_on`: the whole state, whatever
        `weights_only` says."""
        began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.weights_only and not to_go_on:
            weights = state["weights"].items()
            state = {"weights": {n: t.to(torch.bfloat16) for n, t in weights}}
        path = self.path(step)
        try:
            self._write(path, {"step": step, **state})
        except OSError as error:
            text = f"could not write {path}: {error.strerror or error}"
            if not (self.skip_full and is_full(error)):
                raise OSError(
                    f"{text}; free some space and start again, or train on without it "
                    "(train.checkpoint_full_disk=skip)"
                ) from error
            print(f"{text}; training goes on (train.checkpoint_full_disk=skip)", file=sys.stderr)
            return None
        sync_folder(self.folder)
        # later ones are those of a former start that this one has gone back behind
        for old in [p for p in self.saved() if p <= path][: -self.keep]:
            old.unlink(missing_ok=True)
        self.took = max(self.took, time.monotonic() - began)
        return path

    def wait(self) -> None:
        """Nothing to wait for: `save` returns when the file is whole."""

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        """Write, flush, rename; OSError leaves nothing behind."""
        need_space(self.folder, _nbytes(state))
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.ENOSPC, str(error)) from error
        partial.rename(path)

    def saved(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def whole(self, device: torch.device) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Every whole checkpoint, the newest first, read when it is asked for. Damaged ones are
        named on stderr and passed over."""
        found = False
        for path in reversed(self.saved()):
            state = _read(path, device)
            if state is not None:
                found = True
                yield path, state
            del state  # before the next one is read
        if not found:
            say_none_whole(self.folder, self.saved())


class SharedCheckpoints(Checkpoints):
    """The same of an engine with a process a rank, whose rank 0 holds the whole state."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        rank: int,
        weights_only: bool = False,
        skip_full: bool = False,
    ) -> None:
        super().__init__(folder, keep, weights_only, skip_full)
        self.rank = rank

    def save(self, step: int, state: dict[str, Any], to_go_on: bool = False) -> Path | None:
        """Rank 0 writes. The others need not wait: nobody reads before the next start."""
        return super().save(step, state, to_go_on) if self.rank == 0 else self.path(step)

    def whole(self, device: torch.device) -> Iterator[tuple[Path, dict[str, Any]]]:
        """As `Checkpoints.whole`, on the CPU: every rank takes its own part."""
        return super().whole(torch.device("cpu"))


def _read(path: Path, device: torch.device) -> dict[str, Any] | None:
    """None when it is damaged, which stderr is told."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        return state
    except (MemoryError, torch.OutOfMemoryError, PermissionError):
        raise  # the file may be whole: going on without it would drop its steps
    except Exception as error:  # any damage at all: pickle, zip and torch raise their own
        say_damaged(path, error)
        return None


def _nbytes(state: Any) -> int:
    """Of all tensors in nested dictionaries."""
    if isinstance(state, dict):
        return sum(_nbytes(value) for value in state.values())
    return state.nbytes if isinstance(state, Tensor) else 0
