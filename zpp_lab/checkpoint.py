"""Checkpoints of a run: atomic, the newest whole one wins.

A file is written beside its place, flushed to disk and renamed, so that a kill leaves the old
or the new file and never half of one. The same state always gives the same bytes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


class Checkpoints:
    """The `keep` newest checkpoints of a run, in `folder`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state after `step` steps; OSError says which file when the disk is full."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(step)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                torch.save({"step": step, **state}, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            partial.unlink(missing_ok=True)
            raise OSError(
                f"could not write {path}: {error}; free some space and start again"
            ) from error
        partial.rename(path)
        _sync_folder(self.folder)
        for old in self.saved()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def saved(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The newest whole checkpoint; damaged ones are named on stderr and passed over."""
        for path in reversed(self.saved()):
            try:
                state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
                return state
            except Exception as error:  # any damage at all: pickle, zip and torch raise their own
                print(
                    f"checkpoint {path} is damaged ({error}); trying an older one", file=sys.stderr
                )
        return None


class SharedCheckpoints(Checkpoints):
    """The same of an engine with a process a rank, whose rank 0 holds the whole state."""

    def __init__(self, folder: Path, keep: int, rank: int) -> None:
        super().__init__(folder, keep)
        self.rank = rank

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Rank 0 writes. The others need not wait: nobody reads before the next start."""
        return super().save(step, state) if self.rank == 0 else self.path(step)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """As `Checkpoints.load`, on the CPU: every rank takes its own part."""
        return super().load(torch.device("cpu"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
