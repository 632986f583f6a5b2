"""Writes checkpoints: atomic, the newest whole one wins, through bounded host memory.

Ranks write into a folder under another name. Rank 0 then adds the index and renames the folder, so
a kill never leaves half a checkpoint. A rank's part that fits in host memory is copied, and written
by a thread while training continues. A larger one streams to the disk and training waits: a rank
writes up to `FILES` files in parallel, each through its part of the staging memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zpp_lab.files import is_full, need_space, sync_folder, write_atomic
from zpp_lab.runs.checkpoint.index import (
    BLOCK,
    INDEX,
    DamagedError,
    Held,
    Kind,
    index_text,
    listed,
    part_of,
)
from zpp_lab.runs.checkpoint.origin import Origin
from zpp_lab.runs.checkpoint.read import Ranks, Saved, State, flat, local, own_rows, say_passed_over
from zpp_lab.runs.checkpoint.tensor_file import dtype_name, layout

FILES = 4
FILE_BYTES = 2**26  # another file for each so many bytes
FLUSH = 2**28  # a file's bytes between two waits for the disk
HEADROOM = 2**20  # for headers and the index


@dataclass(frozen=True)
class Saving:
    """How checkpoints are written: the settings of `train.checkpoint_*`, in bytes.

    host: the largest part of a rank that is copied, None: nothing is, and nothing said of it;
    staging: memory of a rank's pieces on their way; weights_only: weights alone, in bf16;
    skip_full: a full disk costs the checkpoint only.
    """

    host: int | None = 2**33
    staging: int = FILES * BLOCK
    weights_only: bool = False
    skip_full: bool = False


@dataclass(frozen=True)
class Part:
    """Rows [first, last) of a tensor of `shape`, as this rank writes them: as `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def kind(self) -> Kind:
        return dtype_name(self.dtype), self.shape


def parts_of(state: State, rank: int = 0) -> list[Part]:
    """Return what this rank writes: its rows of sharded tensors; rank 0 whole ones too."""
    found = []
    for name, tensor in sorted(flat(state)):
        sharded, (first, last, writes) = local(tensor) is not tensor, own_rows(tensor)
        if last > first and (writes if sharded else rank == 0) and tensor.numel():
            own = local(tensor).detach()
            found.append(Part(name, tensor.dtype, tuple(tensor.shape), first, last, own))
    return found


class Checkpoints:
    """The `keep` newest checkpoints of a run, in `folder`.

    shared: all ranks see the folder and make every call, with the same arguments but for their own
    shards. `device` is where the tensors are. `took`: seconds of the longest write so far.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        saving: Saving | None = None,
        shared: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        self.folder, self.keep, self.saving = folder, keep, saving or Saving()
        self.device, self.ranks = torch.device(device), Ranks(shared)
        self.rank, self.took = self.ranks.rank, 0.0
        self.held: dict[str, Tensor] = {}  # the copy, whose memory stays for the next one
        self.writing: threading.Thread | None = None
        self.fault: Exception | None = None
        self.damaged: list[Path] = []  # what was passed over

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # ------------------------------------------------------------------ writing

    def save(
        self, step: int, state: State, to_go_on: bool = False, origin: Origin | None = None
    ) -> None:
        """Write the state after `step` steps. Returns when the tensors may change: copied, and a
        thread does the rest, or on the disk. `to_go_on`: the whole state, where usually weights
        alone are saved. `origin`: whose state it is, on rank 0.

        OSError, here or in the next call, names the folder, and the bytes when the disk is full.
        """
        self.wait()
        light = self.saving.weights_only and not to_go_on
        parts = parts_of({k: v for k, v in state.items() if not light or k == "weights"}, self.rank)
        written = [replace(p, dtype=torch.bfloat16) for p in parts] if light else parts
        sizes = self.ranks.gather((sum(p.tensor.nbytes for p in parts), _nbytes(written)))
        largest, total = max(s[0] for s in sizes), sum(s[1] for s in sizes)
        host, began = self.saving.host, time.perf_counter()
        if self.device.type == "cuda":  # no stream keeps us from host memory that a GPU writes
            torch.cuda.synchronize(self.device)
        if host is not None and largest <= host:
            self.held = {p.name: self._copied(p) for p in written}
            copy = [replace(p, tensor=self.held[p.name]) for p in written]
            self.writing = threading.Thread(
                target=self._write,
                args=(step, copy, total, light, origin),
                name="checkpoint",
                daemon=True,
            )
            self.writing.start()
            return
        self._write(step, written, total, light, origin, self.device)
        if self.fault is None and self.rank == 0 and host is not None:
            print(
                f"checkpoint of step {step}: training waited {time.perf_counter() - began:.1f} s "
                f"while {total / 2**30:.2f} GiB were written; a copy would have taken more than "
                f"train.checkpoint_host_gib={host / 2**30:g} of a rank's host memory",
                file=sys.stderr,
            )
        self.wait()

    def _copied(self, part: Part) -> Tensor:
        held = self.held.get(part.name)
        if held is None or held.shape != part.tensor.shape or held.dtype != part.tensor.dtype:
            held = torch.empty_like(part.tensor, device="cpu")
        return held.copy_(part.tensor)

    def wait(self) -> None:
        """Wait until the last checkpoint is whole; OSError where it could not be written."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None
        if self.fault is None:
            return
        fault, self.fault = self.fault, None
        if not isinstance(fault, OSError):
            raise fault
        text = f"could not write a checkpoint to {self.folder}: {fault.strerror or fault}"
        if not (self.saving.skip_full and is_full(fault)):
            raise OSError(
                f"{text}; free space for one more than train.keep_checkpoints and start again, or "
                "train without checkpoints (train.checkpoint_full_disk=skip)"
                if is_full(fault)
                else text
            ) from fault
        if self.rank == 0:
            print(f"{text}; training continues (train.checkpoint_full_disk=skip)", file=sys.stderr)

    def _write(
        self,
        step: int,
        parts: list[Part],
        total: int,
        light: bool,
        origin: Origin | None,
        device: torch.device | None = None,
    ) -> None:
        """Write and seal; `fault` keeps what went wrong, alike on all ranks."""
        began = time.monotonic()
        unsealed = self.folder / f".partial-{step:08d}"
        try:
            self.ranks.all(lambda: self._prepare(unsealed, total))
            files = self.ranks.all(lambda: self._files(unsealed, parts, device))
            every = self.ranks.gather(({p.name: p.kind for p in parts}, files))
            self.ranks.all(lambda: self._seal(step, unsealed, every, light, origin))
            self.took = max(self.took, time.monotonic() - began)
        except Exception as error:  # the training thread must hear
            self.fault = _with_size(error, total)
            if self.rank == 0:  # nobody writes any more, and the space may be needed
                shutil.rmtree(unsealed, ignore_errors=True)

    def _prepare(self, unsealed: Path, total: int) -> None:
        if self.rank == 0:
            self.clean()
            unsealed.mkdir(parents=True)
            need_space(self.folder, total + HEADROOM)

    def _files(
        self, unsealed: Path, parts: list[Part], device: torch.device | None
    ) -> dict[str, Held]:
        """Write this rank's files; what each of them holds."""
        files, stop = _split(parts), threading.Event()
        names = [f"rank-{self.rank:05d}-{i}.safetensors" for i in range(len(files))]
        nbytes = self.saving.staging // max(1, len(files))
        with ThreadPoolExecutor(FILES, thread_name_prefix="checkpoint") as pool:
            jobs = [
                pool.submit(_write_file, unsealed / name, own, nbytes, device, stop)
                for name, own in zip(names, files, strict=True)
            ]
        faults = [e for e in (job.exception() for job in jobs) if e is not None]
        for fault in sorted(faults, key=lambda e: isinstance(e, _StoppedError)):
            raise fault
        return dict(zip(names, (job.result() for job in jobs), strict=True))

    def _seal(
        self, step: int, unsealed: Path, every: list[Any], light: bool, origin: Origin | None
    ) -> None:
        """Write the index, and give the folder its name."""
        if self.rank:
            return
        kinds = {name: kind for own, _ in every for name, kind in own.items()}
        files = {file: held for _, own in every for file, held in own.items()}
        _check_whole(kinds, files)
        write_atomic(unsealed / INDEX, index_text(step, light, kinds, files, origin))
        path = self.path(step)
        if path.exists():
            self._remove(path)
        unsealed.rename(path)
        sync_folder(self.folder)
        self.prune(path)

    def prune(self, newest: Path) -> None:
        """Remove all but the `keep` newest up to `newest`, on rank 0. Later ones are those of a
        former start that this one has gone back behind."""
        for old in [p for p in listed(self.folder) if p.stem <= newest.stem][: -self.keep]:
            if self.rank == 0:
                self._remove(old)

    def _remove(self, path: Path) -> None:
        """A kill meanwhile leaves no half of it under its name."""
        gone = path.rename(self.folder / f".partial-{path.name}")
        shutil.rmtree(gone, ignore_errors=True) if gone.is_dir() else gone.unlink()

    def clean(self) -> None:
        """Remove what a kill has left."""
        for left in self.folder.glob(".partial-*"):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()

    # ------------------------------------------------------------------ reading

    def newest_first(self) -> Iterator[Saved]:
        """Yield every checkpoint whose index and sizes are whole, the same on all ranks, opened
        when it is asked for. Damaged ones are named on stderr and passed over."""
        if self.rank == 0:
            self.clean()
        for path in reversed(self.ranks.gather(listed(self.folder))[0]):
            saved = self.checked(path, partial(self.ranks.all, partial(Saved, path)))
            if saved is not None:
                yield saved

    def checked(self, path: Path, job: Callable[[], Any]) -> Any:
        """Return what `job` makes of the checkpoint `path`; None, on all ranks, if damaged."""
        try:
            return job()
        except DamagedError as error:
            self.damaged.append(path)
            if self.rank == 0:
                say_passed_over(error)
            return None


def _nbytes(parts: list[Part]) -> int:
    return sum(p.nbytes for p in parts)


def _with_size(error: Exception, total: int) -> Exception:
    """A full disk's error says how much was to be written."""
    if not is_full(error) or "bytes" in str(error):
        return error
    assert isinstance(error, OSError)
    return OSError(error.errno, f"{error.strerror}, and {total:,} bytes are needed")


def _check_whole(kinds: Any, files: dict[str, Held]) -> None:
    """Every row of every tensor lies in one file."""
    rows = dict.fromkeys(kinds, 0)
    for held in files.values():
        for name, (first, last, _) in held.items():
            rows[name] += last - first
    for name, (_, shape) in kinds.items():
        assert rows[name] == (shape[0] if shape else 1), f"{name}: {rows[name]} rows of {shape}"


class _StoppedError(Exception):
    """Another file could not be written."""


def _write_file(
    path: Path, parts: list[Part], nbytes: int, device: torch.device | None, stop: threading.Event
) -> Held:
    """Write one file through `nbytes` of staging memory, unless `stop` says that another failed."""
    try:
        cuda = device is not None and device.type == "cuda"
        nbytes = max(8, min(nbytes, BLOCK, max(p.nbytes for p in parts)))
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)
        begin, places = layout({p.name: part_of(p.kind, p.first, p.last) for p in parts})
        named, held, flushed = {p.name: p for p in parts}, {}, 0
        with (
            path.open("wb") as file,
            torch.cuda.stream(torch.cuda.Stream(device)) if cuda else nullcontext(),
        ):
            file.write(begin)
            for part in map(named.__getitem__, places):
                hashes = []
                for block in part.tensor.reshape(-1).split(BLOCK // part.dtype.itemsize):
                    digest = hashlib.sha256()
                    for part_of_block in block.split(nbytes // part.dtype.itemsize):
                        if stop.is_set():
                            raise _StoppedError
                        room = buffer[: part_of_block.numel() * part.dtype.itemsize]
                        room.view(part.dtype).copy_(part_of_block, non_blocking=True)
                        if cuda:
                            torch.cuda.current_stream().synchronize()
                        data = room.numpy().data
                        digest.update(data)
                        file.write(data)
                    hashes.append(digest.hexdigest())
                    if file.tell() - flushed >= FLUSH:
                        flushed = _flush(file)
                held[part.name] = (part.first, part.last, hashes)
            _flush(file)
        return held
    except BaseException:
        stop.set()  # the other files need not go on
        raise


def _flush(file: BinaryIO) -> int:
    """Put what is written on the disk and out of the page cache; return its size."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)
    return file.tell()


def _split(parts: list[Part]) -> list[list[Part]]:
    """Parts for each file, in their order, of nearly the same size together."""
    count = min(FILES, 1 + _nbytes(parts) // FILE_BYTES)
    files: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for i in sorted(range(len(parts)), key=lambda i: -parts[i].nbytes):
        least = sizes.index(min(sizes))
        files[least].append(i)
        sizes[least] += parts[i].nbytes
    return [[parts[i] for i in sorted(own)] for own in files if own]
