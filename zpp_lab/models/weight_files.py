"""Safetensors of a folder, read by rows: one file, or several with an index.

Every rank of a sharded run opens the same files and reads its own rows of each tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"


class WeightFiles:
    """The tensors of `folder`; `files` maps each one's name to its file.

    ValueError when there is no such folder, no .safetensors in it, or an index that names files
    that are not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _listed(folder)
        self.handles: dict[Path, Any] = {}

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self._slice(name).get_shape()
        return shape

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor, fp32; no others are read."""
        part: Tensor = self._slice(name)[first:last]
        return part.float()

    def whole(self, name: str) -> Tensor:
        """A tensor as it was saved."""
        value: Tensor = self._handle(name).get_tensor(name)
        return value

    def complain(self, what: str, names: list[str]) -> None:
        """ValueError that lists `names`, if there are any."""
        if names:
            raise ValueError(f"{self.folder}: {len(names)} tensors {what}: {', '.join(names)}")

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        from safetensors import safe_open

        path = self.files[name]
        if path not in self.handles:
            self.handles[path] = safe_open(path, framework="pt")
        return self.handles[path]


def _listed(folder: Path) -> dict[str, Path]:
    """Tensor name → file."""
    if not folder.is_dir():
        raise ValueError(
            f"model.weights=pretrained reads a folder, and model.path={folder} is none: download "
            "the model first (hf download NAME --local-dir FOLDER)"
        )
    index = folder / INDEX
    if index.is_file():
        listed = json.loads(index.read_text())["weight_map"]
        absent = sorted({f for f in listed.values() if not (folder / f).is_file()})
        if absent:
            raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
        return {name: folder / file for name, file in listed.items()}
    return _in_each(folder)


def _in_each(folder: Path) -> dict[str, Path]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(
            "model.weights=pretrained needs the `safetensors` package: pip install zpp_lab[hf]"
        ) from None
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ValueError(f"model.path={folder} has no .safetensors file")
    return found
