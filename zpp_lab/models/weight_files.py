"""Safetensors of a folder, read by rows: one file, or several with an index.

Every rank of a sharded run opens the same files and reads its own rows of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from zpp_lab.checkpoint.tensor_file import Place, read_layout, read_rows

INDEX = "model.safetensors.index.json"


class WeightFiles:
    """The tensors of `folder`; `files` maps each one's name to its file.

    ValueError when there is no such folder, no .safetensors in it, a file that is cut short, or an
    index that names files or tensors that are not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _listed(folder)
        self.layouts: dict[Path, dict[str, Place]] = {}

    def shape(self, name: str) -> list[int]:
        return list(self._place(name).shape)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor, fp32; no others are read."""
        return read_rows(self.files[name], self._place(name), first, last).float()

    def whole(self, name: str) -> Tensor:
        """A tensor as it was saved."""
        place = self._place(name)
        return read_rows(self.files[name], place, 0, place.shape[0] if place.shape else 1)

    def complain(self, faults: Mapping[str, Sequence[str]]) -> None:
        """ValueError that lists the tensors of every fault, if there are any."""
        said = [f"{len(n)} tensors {what}: {', '.join(n)}" for what, n in faults.items() if n]
        if said:
            raise ValueError(f"{self.folder}: {'; '.join(said)}")

    def _place(self, name: str) -> Place:
        path = self.files[name]
        if path not in self.layouts:
            self.layouts[path] = _opened(path)
        return self.layouts[path][name]


def _listed(folder: Path) -> dict[str, Path]:
    """Tensor name → file. Every file's header is read: a download that was cut is found here."""
    if not folder.is_dir():
        raise ValueError(
            f"model.weights=pretrained reads a folder, and model.path={folder} is none: download "
            "the model first (hf download NAME --local-dir FOLDER)"
        )
    index = folder / INDEX
    return _by_index(folder, index) if index.is_file() else _in_each(folder)


def _by_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of safetensors ({type(error).__name__}: {error}): download it "
            "again"
        ) from None
    absent = sorted({f for f in listed.values() if not (folder / f).is_file()})
    if absent:
        raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
    there = {f: set(_opened(folder / f)) for f in sorted(set(listed.values()))}
    wrong = sorted(f"{name} in {file}" for name, file in listed.items() if name not in there[file])
    if wrong:
        raise ValueError(f"{index} names tensors that are not there: {', '.join(wrong)}")
    return {name: folder / file for name, file in listed.items()}


def _in_each(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= dict.fromkeys(_opened(path), path)
    if not found:
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        hint = f" but {pickles[0]}: save the model again as safetensors" if pickles else ""
        fix = hint or ": fetch it whole, or leave out model.weights=pretrained for a random start"
        raise ValueError(f"model.path={folder} has no .safetensors file{fix}")
    return found


def _opened(path: Path) -> dict[str, Place]:
    """Of a file whose header fits its size. ValueError when it is cut short or something else."""
    try:
        return read_layout(path)
    except (ValueError, OSError) as error:
        with path.open("rb") as file:
            pointer = file.read(20).startswith(b"version https://git")
        fix = "git lfs pull fetches what it points to" if pointer else "download it again"
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) is no whole safetensors file ({error}): {fix}"
        ) from None
