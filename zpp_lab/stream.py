"""Tensors on their way between a device and a checkpoint's files, a bounded piece at a time.

`StreamWriter` and `StreamReader` put raw bytes into the places that torch.distributed.checkpoint
plans; planning, resharding and `.metadata` stay torch's. A rank writes up to `LANES` files side
by side: each lane copies a piece to its part of the staging memory, adds it to the file's CRC-32
and writes it, so while one lane copies, others write. Nothing is ever there a second time, neither
on the device nor in host memory, and written pages leave the page cache as they reach the disk.

    __0_0.distcp   tensors one after the other, each at a multiple of `ALIGN` bytes
"""

from __future__ import annotations

import copyreg
import os
import pickle
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from zpp_lab.files import need_space

LANES = 4
LANE_BYTES = 2**26  # another lane for each so many bytes
ALIGN = 64
FLUSH = 2**28  # a file's bytes between two waits for the disk
HEADROOM = 2**20  # for .metadata and the marker
PROPERTIES = 5  # of a tensor in `.metadata`; torch 2.15 writes a sixth, its strides


class CastPlanner(DefaultSavePlanner):
    """Plans every tensor as `dtype`; the writer converts piece by piece."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[self._cast(item) for item in plan.items])
        return self.plan

    def _cast(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        assert data is not None, "checkpoints hold tensors only"
        properties = replace(data.properties, dtype=self.dtype)
        return replace(item, tensor_data=replace(data, properties=properties))


class StreamWriter(FileSystemWriter):
    """Writes this rank's part of a checkpoint to the folder `path`.

    staging: bytes of host memory for pieces on their way. After the save `sums` has size and
    CRC-32 of each file, and the files are on the disk. OSError when the disk is too small,
    before anything is written.
    """

    def __init__(self, path: Path, staging: int, device: torch.device) -> None:
        super().__init__(path)
        self.staging, self.device = staging, device
        self.sums: dict[str, tuple[int, int]] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        need_space(Path(self.path), HEADROOM + sum(_nbytes(i) for p in plans for i in p.items))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        lanes = _lanes(plan.items)
        lane_bytes = max(8, self.staging // max(1, len(lanes)))
        results: list[WriteResult] = []
        with ThreadPoolExecutor(max(1, len(lanes)), thread_name_prefix="checkpoint") as pool:
            stop = threading.Event()
            started = []
            for i, items in enumerate(lanes):
                name = f"{plan.storage_data.prefix}{i}.distcp"
                lane = _Lane(Path(self.path) / name, lane_bytes, self.device, ready, stop)
                started.append((lane, pool.submit(lane.write, items, planner)))
            for lane, job in started:
                results += job.result()
                self.sums[lane.path.name] = (lane.size, lane.crc)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        if len(TensorProperties().__getstate__()) > PROPERTIES:
            _write_for_all(Path(self.path) / ".metadata")


def _write_for_all(path: Path) -> None:
    """Rewrite `.metadata` as every torch that zpp_lab supports reads it."""
    metadata = pickle.loads(path.read_bytes())
    with path.open("wb") as file:
        _MetadataPickler(file).dump(metadata)


class _MetadataPickler(pickle.Pickler):
    """torch 2.11 and 2.13 cannot unpickle a tensor that has more properties than their own."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorProperties):
            return NotImplemented
        return copyreg.__newobj__, (type(value),), value.__getstate__()[:PROPERTIES]  # type: ignore[attr-defined]


class _Lane:
    """One file and the staging memory on the way to it."""

    def __init__(
        self,
        path: Path,
        nbytes: int,
        device: torch.device,
        ready: torch.cuda.Event | None,
        stop: threading.Event,
    ) -> None:
        self.path, self.device, self.ready, self.stop = path, device, ready, stop
        self.nbytes = nbytes
        self.size = self.crc = self.flushed = 0

    def write(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        try:
            largest = max(_nbytes(item) for item in items)
            pinned = self.device.type == "cuda"
            self.buffer = torch.empty(
                max(ALIGN, min(self.nbytes, largest)), dtype=torch.uint8, pin_memory=pinned
            )
            with self.path.open("wb", buffering=0) as self.file, self._on_device():
                results = [self._item(item, planner) for item in items]
                os.fsync(self.file.fileno())
                self._forget()
            return results
        except BaseException:
            self.stop.set()  # the other lanes need not go on
            raise

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Copies run beside training's kernels, after those that made the tensors."""
        with ExitStack() as stack:
            if self.ready is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stream = torch.cuda.Stream()
                stream.wait_event(self.ready)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def _item(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        assert item.tensor_data is not None, "checkpoints hold tensors only"
        self._put(memoryview(bytes(-self.size % ALIGN)))
        first = self.size
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        for piece in self._staged(tensor, item.tensor_data.properties.dtype):
            self._put(piece)
        info = _StorageInfo(self.path.name, first, self.size - first)
        return WriteResult(item.index, self.size - first, info)

    def _staged(self, tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
        flat = tensor.detach().reshape(-1)
        each = self.buffer.numel() // dtype.itemsize
        for first in range(0, flat.numel(), each):
            source = flat[first : first + each]
            size = source.numel() * dtype.itemsize
            self.buffer[:size].view(dtype).copy_(source, non_blocking=True)
            if self.ready is not None:
                torch.cuda.current_stream().synchronize()
            yield self.buffer[:size].numpy().data

    def _put(self, data: memoryview) -> None:
        if self.stop.is_set():
            raise OSError(f"{self.path.name}: another file could not be written")
        self.crc = zlib.crc32(data, self.crc)
        while data:
            written = self.file.write(data)
            self.size, data = self.size + written, data[written:]
        if self.size - self.flushed >= FLUSH:
            os.fsync(self.file.fileno())
            self._forget()

    def _forget(self) -> None:
        """What is on the disk need not stay in the page cache, which may count as ours."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), 0, self.size, os.POSIX_FADV_DONTNEED)
        self.flushed = self.size


def _nbytes(item: WriteItem) -> int:
    """Of the part of a tensor that one rank writes."""
    assert item.tensor_data is not None, "checkpoints hold tensors only"
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _lanes(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Items for each file, in the plan's order, of nearly the same size together."""
    total = sum(map(_nbytes, items))
    lanes: list[list[int]] = [[] for _ in range(min(LANES, 1 + total // LANE_BYTES))]
    sizes = [0] * len(lanes)
    for i in sorted(range(len(items)), key=lambda i: -_nbytes(items[i])):
        least = sizes.index(min(sizes))
        lanes[least].append(i)
        sizes[least] += _nbytes(items[i])
    return [[items[i] for i in sorted(lane)] for lane in lanes if lane]


class StreamReader(FileSystemReader):
    """Reads what `StreamWriter` wrote: files are mapped, and only the wanted rows are touched."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.tensors: dict[str, Any] = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            mapped = _mapped(Path(self.path) / name)
            for item in sorted(items, key=lambda i: self.storage_data[i.storage_index].offset):
                self._read(mapped, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, mapped: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        dtype, sizes = self._chunk(item.storage_index)
        part = mapped[info.offset : info.offset + info.length].view(dtype).view(sizes)
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, first, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)

    def _chunk(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        tensor = self.tensors[index.fqn]
        sizes = next(c.sizes for c in tensor.chunks if index.offset in (None, c.offsets))
        return tensor.properties.dtype, sizes


def _mapped(path: Path) -> Tensor:
    """A file's bytes as uint8; nothing is read yet."""
    size = path.stat().st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), size=size, dtype=torch.uint8)


class HostCopy:
    """A state's tensors in host memory, which stays for the next copy."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as it is now, with the same names and sharding."""
        flat, _ = flatten_state_dict(state)
        self.held = {name: self._copied(name, t) for name, t in flat.items()}
        return dict(self.held)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        held = self.held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            return tensor.detach().to("cpu", copy=True)
        own = held.to_local() if isinstance(held, DTensor) else held
        own.copy_(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return held


def local_bytes(state: dict[str, Any]) -> int:
    """Bytes of the state's tensors on this rank."""
    flat, _ = flatten_state_dict(state)
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in flat.values())
