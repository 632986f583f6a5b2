"""Safetensors files of a bounded size, and the index that says which holds what."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from zpp_lab.files import need_space
from zpp_lab.models.start import INDEX
from zpp_lab.runs.checkpoint.tensor_file import dtype_name, layout

LIMIT = 4 << 30  # bytes of a file


def write_safetensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    limit: int = LIMIT,
) -> int:
    """Write every tensor of `shapes` as `dtype`, or each as its own; returns their bytes.

    One file, or several with an index when all take more than `limit`; a tensor is never cut.
    `read` gives one whole tensor. ValueError for numbers that `dtype` cannot hold, OSError when
    the disk cannot hold the files: what is too much is said before anything is read.
    """
    dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, torch.dtype) else dtype
    sizes = {n: math.prod(shape) * dtypes[n].itemsize for n, shape in shapes.items()}
    need_space(folder, sum(sizes.values()))
    files = cut(sizes, limit)
    where: dict[str, str] = {}
    for i, names in enumerate(files, 1):
        one = len(files) == 1
        file = "model.safetensors" if one else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        _write(folder / file, names, read, shapes, dtypes)
        where |= dict.fromkeys(names, file)
    total = sum(sizes.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _write(
    path: Path,
    names: list[str],
    read: Callable[[str], Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    begin, places = layout({n: (dtype_name(dtypes[n]), shapes[n]) for n in names})
    try:
        with path.open("wb") as file:
            file.write(begin)
            for name in places:
                value = _as(read(name), dtypes[name], name)
                assert tuple(value.shape) == shapes[name]
                file.write(value.cpu().view(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        fix = "free some space there, or use another --out"
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}; {fix}") from error


def cut(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Return names in their order, in groups of at most `limit` bytes (a larger one is alone)."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _as(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    made = value.to(dtype).contiguous()
    if dtype == torch.float16 and not bool((made.isfinite() | ~value.isfinite()).all()):
        raise ValueError(f"{name} has numbers beyond {dtype}: export with --dtype bf16 or fp32")
    return made
