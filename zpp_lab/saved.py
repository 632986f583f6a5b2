"""The weights of a run's newest whole checkpoint, one tensor at a time.

A model of 30 billion parameters must not be in memory as a whole, let alone twice.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zpp_lab.files import say_damaged


class SavedWeights(Protocol):
    step: int
    shapes: dict[str, tuple[int, ...]]
    marks: dict[str, Tensor]  # of the frozen base that the weights, adapters then, stand on

    def read(self, name: str) -> Tensor:
        """A whole weight on the CPU, fp32."""
        ...

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a weight on the CPU, fp32; others are not kept, nor whole ones
        read."""
        ...


class OneFile:
    """A checkpoint of the virtual engine: a .pt file, mapped into memory, not read."""

    def __init__(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.step = int(state["step"])
        self.weights: dict[str, Tensor] = state["weights"]
        self.marks: dict[str, Tensor] = state.get("base", {})
        self.shapes = {n: tuple(t.shape) for n, t in self.weights.items()}

    def read(self, name: str) -> Tensor:
        return self.weights[name].float()

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self.weights[name][first:last].float()


def open_saved(path: Path) -> SavedWeights:
    """The weights of a checkpoint, or of the newest whole one of a run's folder.

    Every rank of a large run calls this, so files are compared by size, not by content.
    ValueError when `path` is neither, or the checkpoint is cut short.
    """
    if (path / "checkpoints").is_dir():
        return newest(path, thorough=False)
    if not path.exists() or not path.name.startswith("step-"):
        raise ValueError(
            f"{path} is no run's folder with checkpoints, and no checkpoint (step-…) of one"
        )
    fault = _fault(path, thorough=False)
    if fault is not None:
        raise ValueError(f"checkpoint {path} is damaged ({fault}); use another one")
    return _open(path)


def newest(run: Path, thorough: bool = True) -> SavedWeights:
    """The newest whole checkpoint of the run in `run`; damaged ones are named on stderr.

    thorough: every byte is looked at. ValueError when there is none.
    """
    folder = run / "checkpoints"
    written = [p for p in folder.glob("step-*") if p.is_dir() or p.suffix == ".pt"]
    for path in sorted(written, key=lambda p: p.stem, reverse=True):
        fault = _fault(path, thorough)
        if fault is None:
            return _open(path)
        say_damaged(path, fault)
    raise ValueError(
        f"{folder} has no whole checkpoint: let the run reach its first one "
        "(train.checkpoint_every), or its end"
    )


def _open(path: Path) -> SavedWeights:
    if not path.is_dir():
        return OneFile(path)
    from zpp_lab.dcp_read import Shards  # with torch's sharded checkpoints, which take a second

    return Shards(path)


def _fault(path: Path, thorough: bool) -> str | None:
    """What is wrong with a checkpoint; None: nothing."""
    if path.is_dir():
        from zpp_lab.dcp_read import damage, wrong_size

        return damage(path) if thorough else wrong_size(path)
    try:
        with zipfile.ZipFile(path) as file:  # its directory stands at its end
            broken = file.testzip() if thorough else None  # parts carry a CRC-32
    except (OSError, zipfile.BadZipFile) as error:
        return str(error)
    return f"{broken}: not the bytes that were written" if broken else None
