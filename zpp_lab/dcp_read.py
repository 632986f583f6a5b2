"""Reads the checkpoints that `dcp.py` writes: whole, by tensor or by rows, on any number of ranks.

Tensors are found by name. A folder whose files do not match its whole.json is damaged.
"""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zpp_lab.stream import StreamReader

MARKER = "whole.json"  # the step, and size and CRC-32 of every file
RAW = "raw"  # the format of stream.py; older checkpoints have torch's own and say nothing
# reading for one process is what we mean, and torch says at each call that it assumes so
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
State = dict[str, Any]  # "weights": {name: tensor}; "optimizer": {key: {name: tensor}}; "base"
_BASE, _WEIGHTS = "base.", "weights."


def size_and_crc(path: Path) -> tuple[int, int]:
    """Of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


def damage(path: Path, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with every `world`-th file of a checkpoint from `rank` on; None: nothing."""
    try:
        files = marker_of(path)["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MARKER}: {error}"
    for name in sorted(files)[rank::world]:
        try:
            now = size_and_crc(path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if list(now) != list(files[name]):
            return f"{name}: not the bytes that were written"
    return None


def wrong_size(path: Path) -> str | None:
    """Which file of a checkpoint is missing or of another size; None: none is."""
    try:
        files = marker_of(path)["files"]
        wrong = [name for name, (size, _) in files.items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MARKER}: {error}"
    return f"{wrong[0]}: not as many bytes as were written" if wrong else None


def marker_of(path: Path) -> dict[str, Any]:
    """What whole.json says; OSError or ValueError where it cannot be read."""
    found: dict[str, Any] = json.loads((path / MARKER).read_text())
    return found


def saved_step(path: Path) -> int:
    return int(marker_of(path)["step"])


def holds_weights_only(path: Path) -> bool:
    return bool(marker_of(path).get("weights_only"))


def _reader(path: Path) -> dcp.FileSystemReader:
    return (
        StreamReader(path) if marker_of(path).get("format") == RAW else dcp.FileSystemReader(path)
    )


def saved_names(path: Path) -> dict[str, torch.Size]:
    """Every saved tensor's dotted name and whole shape."""
    return {n: m.size for n, m in _tensors(path).items()}


def saved_states(path: Path) -> dict[str, dict[str, torch.dtype]]:
    """How a checkpoint keeps optimizer states: {key: {parameter: dtype}}; {} when it has none."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for dotted, tensor in _tensors(path).items():
        kind, _, rest = dotted.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            found.setdefault(key, {})[name] = tensor.properties.dtype
    return found


def _tensors(path: Path) -> dict[str, Any]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {n: m for n, m in metadata.items() if hasattr(m, "size")}


def read_into(path: Path, state: State) -> None:
    """Fill the tensors of `state`, sharded or whole, from a checkpoint. Its names must exist."""
    dcp.load(state, storage_reader=_reader(path), no_dist=not dist.is_initialized())


def read_tensor(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """One whole fp32 tensor of a checkpoint by its dotted name, on the CPU, for one process."""
    found = {name: torch.empty(shape)}
    dcp.load(found, storage_reader=_reader(path), no_dist=True)
    return found[name]


class RowReader:
    """Reads rows of a checkpoint's tensors, for this process alone: only the files' parts that
    hold some of them."""

    def __init__(self, path: Path) -> None:
        self.reader = _reader(path)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of the tensor `name`, fp32 on the CPU."""
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        planner = _RowPlanner(torch.empty(last - first, *stored.size[1:]))
        offsets = torch.Size((first, *(0 for _ in stored.size[1:])))
        wanted = [ChunkStorageMetadata(offsets, planner.rows.size())]
        if last > first:
            items = create_read_items_for_chunk_list(name, stored, wanted)
            self.reader.read_data(LoadPlan(items), planner).wait()
        return planner.rows


class _RowPlanner(DefaultLoadPlanner):
    """Everything that is read goes into one tensor."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.rows


def saved_marks(path: Path) -> dict[str, Tensor]:
    """The marks of the frozen base on which a checkpoint's adapters stand; none for most."""
    sizes = {n: size for n, size in saved_names(path).items() if n.startswith(_BASE)}
    found = {n: torch.empty(size, dtype=torch.int64) for n, size in sizes.items()}
    if found:
        dcp.load(found, storage_reader=_reader(path), no_dist=True)
    return {n.removeprefix(_BASE): t for n, t in found.items()}


class Shards:
    """The weights of a checkpoint that is a folder, one tensor at a time (`saved.SavedWeights`)."""

    def __init__(self, path: Path) -> None:
        self.path, self.step, self.marks = path, saved_step(path), saved_marks(path)
        names = {n: s for n, s in saved_names(path).items() if n.startswith(_WEIGHTS)}
        self.shapes = {n.removeprefix(_WEIGHTS): tuple(s) for n, s in names.items()}
        self.reader = RowReader(path)

    def read(self, name: str) -> Tensor:
        return read_tensor(self.path, _WEIGHTS + name, self.shapes[name])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self.reader.rows(_WEIGHTS + name, first, last)


def read_whole(path: Path) -> State:
    """A checkpoint's whole tensors on the CPU: `step`, `weights`, `optimizer`, and `base` where
    adapters stand on one.

    For one process, or for every rank alike. ValueError when the checkpoint is damaged.
    """
    fault = damage(path)
    if fault:
        raise ValueError(f"{path} is damaged: {fault}; use another checkpoint")
    marks = saved_marks(path)
    flat: dict[str, Tensor] = {
        n: torch.empty(m.size, dtype=m.properties.dtype)
        for n, m in _tensors(path).items()
        if not n.startswith(_BASE)
    }
    dcp.load(flat, storage_reader=_reader(path), no_dist=True)
    state: State = {"step": saved_step(path), "weights": {}, "optimizer": {}}
    for dotted, tensor in flat.items():
        kind, _, name = dotted.partition(".")
        if kind == "weights":
            state["weights"][name] = tensor
        else:
            key, _, name = name.partition(".")
            state["optimizer"].setdefault(key, {})[name] = tensor
    return state | ({"base": marks} if marks else {})
