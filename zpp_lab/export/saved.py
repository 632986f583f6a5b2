"""The weights of a run's newest whole checkpoint, one tensor at a time.

A model of 30 billion parameters must not be in memory as a whole, let alone twice.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zpp_lab.dcp import damage, read_tensor, saved_marks, saved_names, saved_step
from zpp_lab.frozen import Marks

_PREFIX = "weights."


class SavedWeights(Protocol):
    step: int
    shapes: dict[str, tuple[int, ...]]
    marks: Marks  # of the frozen base that the weights, adapters then, stand on

    def read(self, name: str) -> Tensor:
        """A whole weight on the CPU, fp32."""
        ...


class OneFile:
    """A checkpoint of the virtual engine: a .pt file, mapped into memory, not read."""

    def __init__(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.step = int(state["step"])
        self.weights: dict[str, Tensor] = state["weights"]
        self.marks: Marks = state.get("base", {})
        self.shapes = {n: tuple(t.shape) for n, t in self.weights.items()}

    def read(self, name: str) -> Tensor:
        return self.weights[name]


class Shards:
    """A checkpoint of the fsdp engine: a folder with each rank's shards."""

    def __init__(self, path: Path) -> None:
        self.path, self.step, self.marks = path, saved_step(path), saved_marks(path)
        names = {n: s for n, s in saved_names(path).items() if n.startswith(_PREFIX)}
        self.shapes = {n.removeprefix(_PREFIX): tuple(s) for n, s in names.items()}

    def read(self, name: str) -> Tensor:
        return read_tensor(self.path, _PREFIX + name, self.shapes[name])


def newest(run: Path) -> SavedWeights:
    """The newest whole checkpoint of the run in `run`; damaged ones are named on stderr.

    ValueError when there is none.
    """
    folder = run / "checkpoints"
    written = [p for p in folder.glob("step-*") if p.is_dir() or p.suffix == ".pt"]
    for path in sorted(written, key=lambda p: p.stem, reverse=True):
        fault = damage(path) if path.is_dir() else _file_damage(path)
        if fault is None:
            return Shards(path) if path.is_dir() else OneFile(path)
        print(f"checkpoint {path} is damaged ({fault}); trying an older one", file=sys.stderr)
    raise ValueError(
        f"{folder} has no whole checkpoint: let the run reach its first one "
        "(train.checkpoint_every), or its end"
    )


def _file_damage(path: Path) -> str | None:
    """What is wrong with a .pt file, whose parts carry a CRC-32; None: nothing."""
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        return str(error)
    return f"{broken}: not the bytes that were written" if broken else None
