"""Reads checkpoints: whole, by tensor or by rows, on any number of ranks, whichever engine wrote.

What is read is checked first, 16 MiB at a time, and nothing else is: a rank that wants its rows
reads and checks those of a 13B checkpoint alone.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.codecs.planes import joined, split
from zpp_lab.config.schema import Config
from zpp_lab.runs.checkpoint.index import (
    BLOCK,
    DamagedError,
    ForeignError,
    Shard,
    Stored,
    check_format,
    intact,
    listed,
    open_index,
)
from zpp_lab.runs.checkpoint.origin import foreign
from zpp_lab.runs.checkpoint.tensor_file import torch_dtype

# "weights": {name: tensor}; "low": {name: tensor}, where weights are high planes;
# "optimizer": {key: {name: tensor}}; "base"; "memory": {wire.name: …}
State = dict[str, Any]
THREADS = 4  # tensors that are read side by side


class SavedWeights(Protocol):
    """The weights of a checkpoint, or what stands for them."""

    step: int
    shapes: dict[str, tuple[int, ...]]
    marks: dict[str, Tensor]  # of the frozen base that the weights, adapters then, stand on

    def read(self, name: str) -> Tensor:
        """Return a whole weight on the CPU, fp32."""
        ...

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of a weight on the CPU, fp32; others are not read."""
        ...


@dataclass(frozen=True)
class Rows:
    """Rows from `first` on of a whole tensor of `shape`, or these `columns` of them: what a rank
    has of a tensor that is cut along both dimensions. `writes`: whether this rank saves them."""

    shape: tuple[int, ...]
    first: int
    tensor: Tensor
    columns: slice | None = None
    writes: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def numel(self) -> int:
        return self.tensor.numel()


class Ranks:
    """Exchange between ranks that share checkpoints; `shared`: the default process group."""

    def __init__(self, shared: bool) -> None:
        self.group = dist.new_group(backend="gloo") if shared else None
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        found: list[Any] = [value] * self.world
        if self.group is not None:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def all(self, job: Callable[[], Any]) -> Any:
        """Return the job's value; where it fails on a rank, all raise the first one's error."""
        value = fault = found = None
        try:
            value = job()
        except Exception as error:
            fault = found = error
            if not isinstance(error, OSError | ValueError):  # others may not survive the way
                found = RuntimeError(f"rank {self.rank}: {type(error).__name__}: {error}")
        first = next((f for f in self.gather(found) if f is not None), None)
        if first is not None:
            raise first if fault is None or isinstance(first, OSError | ValueError) else fault
        return value


class Saved:
    """A checkpoint whose index and files' sizes are whole; its content is checked when it is read.

    Opening it raises DamagedError, or ValueError when it is of another format; so does reading.
    """

    def __init__(self, path: Path) -> None:
        self.path, index = path, open_index(path)
        self.step, self.weights_only, self.tensors = index.step, index.weights_only, index.tensors
        self.origin = index.origin
        self.marks = {n: self._whole(f"base.{n}") for n in self._kind("base")}
        self.shapes = {n: t.shape for n, t in self._kind("weights").items()}

    @property
    def kept_names(self) -> frozenset[str]:
        """Weights of which it has what nodes kept: those that travelled as differences."""
        return frozenset(self._kind("kept"))

    def _kind(self, kind: str) -> dict[str, Stored]:
        """Tensors under `kind` by the rest of their names."""
        start = f"{kind}."
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}

    def states(self) -> dict[str, dict[str, torch.dtype]]:
        """Return the dtypes of optimizer states: {key: {parameter: dtype}}."""
        found: dict[str, dict[str, torch.dtype]] = {}
        for dotted, stored in self._kind("optimizer").items():
            key, _, name = dotted.partition(".")
            found.setdefault(key, {})[name] = torch_dtype(stored.dtype)
        return found

    def memories(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return what encoders remember, by WIRE.PARAMETER: dtype and shape [W, rows, width]."""
        return {n: (torch_dtype(t.dtype), t.shape) for n, t in self._kind("memory").items()}

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.rows(name, 0, shape[0] if shape else 1).view(shape)

    def kept(self, name: str) -> Tensor | None:
        """Return a whole node-replicated weight, in param_dtype on the CPU; None without it."""
        dotted = f"kept.{name}"
        return self._whole(dotted) if dotted in self.tensors else None

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of a weight, fp32 on the CPU, reading their blocks alone."""
        out = torch.empty(last - first, *self.shapes[name][1:])
        low, names = f"low.{name}", (f"weights.{name}", f"low.{name}")
        if low not in self.tensors:
            self._fill(names[0], first, out)
            return out
        planes = [torch.empty(out.shape, dtype=d) for d in (torch.bfloat16, torch.int16)]
        for each, plane in zip(names, planes, strict=True):
            self._fill(each, first, plane)
        return joined(*planes)

    def state(self) -> State:
        """Read everything as whole tensors on the CPU: `weights`, `optimizer`, and `base`, `kept`,
        `memory` and `scaler` where there are some."""
        state: State = {"weights": {}, "optimizer": {}}
        for dotted, tensor in self._side_by_side(lambda n: (n, self._whole(n)), self.tensors):
            kind, _, name = dotted.partition(".")
            into = state.setdefault(kind, {})
            if kind == "optimizer":
                key, _, name = name.partition(".")
                into = into.setdefault(key, {})
            into[name] = tensor
        return state

    def read_into(self, state: State) -> None:
        """Fill the tensors of `state`, sharded or whole, each rank its own rows. Weights in one
        piece and in two planes are converted into each other.

        ValueError when one is not there, or of another shape.
        """
        wanted = dict(flat(state))
        planes = {n.removeprefix("low."): t for n, t in wanted.items() if n.startswith("low.")}
        other = bool(planes) != bool(self._kind("low"))  # weights are kept otherwise here
        names = [name for name in wanted if not (other and name.startswith("low."))]
        for name in names:
            stored = self.tensors.get(name)
            if stored is None or stored.shape != tuple(wanted[name].shape):
                raise ValueError(f"{self.path} is of another model; {name} differs")

        def fill(name: str) -> None:
            (first, last, _), own = own_rows(wanted[name]), local(wanted[name]).detach()
            columns = getattr(wanted[name], "columns", None)  # of `Rows`
            if not other or not name.startswith("weights."):
                if columns is None:
                    self._fill(name, first, own)
                    return
                rows = torch.empty(len(own), *wanted[name].shape[1:], dtype=own.dtype)
                self._fill(name, first, rows)
                own.copy_(rows[:, columns])
                return
            weight = name.removeprefix("weights.")
            values = self.rows(weight, first, last)
            values = values.view(own.shape) if columns is None else values[:, columns]
            if weight not in planes:
                own.copy_(values)
                return
            high, low = split(values)
            own.copy_(high)
            local(planes[weight]).copy_(low)

        list(self._side_by_side(fill, names))

    def check_origin(self, run: Path, config: Config | None = None) -> None:
        """Raise ForeignError where it is not of the run in the folder `run`."""
        if why := foreign(self.origin, self.step, run, config):
            raise ForeignError(self.path, why)

    def check(self, kinds: str | tuple[str, ...] = "", part: int = 0, parts: int = 1) -> None:
        """Raise DamagedError unless every byte of the tensors under `kinds` is what was written.
        part: look at this one of so many parts of them."""

        def look(name: str) -> None:
            for shard in self.tensors[name].shards:
                for _ in self._blocks(name, shard, 0, shard.place.nbytes):
                    pass

        names = [n for n in self.tensors if n.startswith(kinds)]
        list(self._side_by_side(look, names[part::parts]))

    def _side_by_side(self, job: Any, names: Any) -> Iterator[Any]:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
            yield from pool.map(job, names)

    def _whole(self, name: str) -> Tensor:
        stored = self.tensors[name]
        out = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
        self._fill(name, 0, out)
        return out

    def _fill(self, name: str, first: int, out: Tensor) -> None:
        """Copy the rows from `first` on into `out`, converted to its dtype."""
        flat_out, stored = out.view(-1), self.tensors[name]
        dtype = torch_dtype(stored.dtype)
        each = prod(stored.shape[1:])  # elements of a row
        last = first + (len(out) if stored.shape else 1)
        for shard in stored.shards:
            low, high, row = max(first, shard.first), min(last, shard.last), shard.place.row
            if low >= high:
                continue
            ends = ((low - shard.first) * row, (high - shard.first) * row)
            at = (low - first) * each
            for data in self._blocks(name, shard, *ends):
                values = data.view(dtype)
                flat_out[at : at + values.numel()].copy_(values)
                at += values.numel()

    def _blocks(self, name: str, shard: Shard, start: int, end: int) -> Iterator[Tensor]:
        """Bytes [start, end) of a shard, each part in one checked block and one reused buffer."""
        size = shard.place.nbytes
        buffer = torch.empty(min(BLOCK, size), dtype=torch.uint8)
        first = start // BLOCK
        with (
            intact(self.path, f"{shard.file}: {name}"),
            (self.path / shard.file).open("rb") as file,
        ):
            file.seek(shard.place.start + first * BLOCK)
            for i in range(first, -(-end // BLOCK)):
                block = buffer[: min(BLOCK, size - i * BLOCK)]
                if (
                    file.readinto(block.numpy().data) < len(block)
                    or hashlib.sha256(block.numpy().data).hexdigest() != shard.hashes[i]
                ):
                    what = f"{name}, in rows {shard.first} to {shard.last - 1}"
                    raise DamagedError(self.path, f"{shard.file}: {what}: its SHA-256 differs")
                yield block[max(0, start - i * BLOCK) : end - i * BLOCK]


def flat(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield dotted names and tensors of nested dictionaries."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def local(tensor: Any) -> Tensor:
    """Return this rank's rows of it."""
    if isinstance(tensor, Rows):
        return tensor.tensor
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, asked without importing their module, which takes a second."""
    return hasattr(tensor, "placements")


def own_rows(tensor: Any) -> tuple[int, int, bool]:
    """Return which rows of a whole tensor this rank has, [first, last), and whether it is the first
    rank that has them. Of a tensor without dimensions there is one."""
    if isinstance(tensor, Rows):
        return tensor.first, tensor.first + len(tensor.tensor), tensor.writes
    rows, first_to_have = (tensor.shape[0] if tensor.ndim else 1), True
    found = (0, rows)
    if _is_sharded(tensor):
        place = tensor.device_mesh.get_coordinate()
        assert place is not None, "every rank has a part of every tensor"
        first_to_have = 0 in tensor.device_mesh.mesh  # of meshes side by side the first
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard(0):
                each = -(-rows // tensor.device_mesh.size(dim))
                found = tuple(min(rows, each * n) for n in (place[dim], place[dim] + 1))  # type: ignore[assignment]
            else:
                assert placement.is_replicate()
                first_to_have &= place[dim] == 0
        assert found[1] - found[0] == len(tensor.to_local())
    return *found, first_to_have


# ---------------------------------------------------------------------- by path


def open_saved(path: Path, ranks: Ranks | None = None) -> Saved:
    """Return a checkpoint, or the `newest` one of a run's folder, whose weights are whole.

    Every rank of a large run calls this, looks at a part of the weights, and then reads its own
    rows. ValueError on all ranks when `path` is neither, or the checkpoint is damaged.
    """
    ranks = ranks or Ranks(shared=False)
    if (path / "checkpoints").is_dir():
        return newest(path, ranks)
    if not path.exists() or not path.name.startswith("step-"):
        raise ValueError(
            f"{path} is neither a run's folder with checkpoints nor a checkpoint (step-…)"
        )
    check_format(path)
    found: Saved = ranks.all(lambda: _whole(path, "weights.", ranks))
    return found


def _whole(path: Path, kinds: str | tuple[str, ...], ranks: Ranks) -> Saved:
    saved = Saved(path)
    saved.check(kinds, ranks.rank, ranks.world)
    return saved


def newest(
    run: Path, ranks: Ranks | None = None, kinds: str | tuple[str, ...] = "weights."
) -> Saved:
    """Return the newest checkpoint of the run in `run` whose tensors under `kinds` are whole: every
    byte of them is looked at, by each of `ranks` a part. Damaged ones and those of other runs are
    named on stderr. ValueError when there is none; ranks that share it all get the same."""
    folder, ranks = run / "checkpoints", ranks or Ranks(shared=False)

    def whole(path: Path) -> Saved:
        Saved(path).check_origin(run)
        return _whole(path, kinds, ranks)

    first: DamagedError | None = None
    for path in reversed(ranks.gather(listed(folder))[0]):
        try:
            found: Saved = ranks.all(partial(whole, path))
            return found
        except DamagedError as error:
            first = first or error
            if ranks.rank == 0:
                say_passed_over(error)
    if first is not None:
        raise ValueError(f"{folder} has no whole checkpoint; {first}: restore one from a copy")
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not a folder: restore it from a copy")
    raise ValueError(
        f"{folder} has no whole checkpoint: let the run reach its first one "
        "(train.checkpoint_every), or its end"
    )


def say_passed_over(error: DamagedError) -> None:
    print(f"{error}; trying an older one", file=sys.stderr)
