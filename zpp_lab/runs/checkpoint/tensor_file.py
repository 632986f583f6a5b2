"""Safetensors files: the bytes before the data, which need no torch, and rows of tensors.

8 bytes          length of the header, little-endian
header           JSON: each tensor's dtype, shape and place in the data
data             the tensors without gaps, by dtype, wide ones first, then by name
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# safetensors' name → torch's, bytes an element; in the order that the safetensors library writes
DTYPES: dict[str, tuple[str, int]] = {
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_LONGEST = 10**8  # bytes of a header, as the library has it


@dataclass(frozen=True)
class Place:
    """A tensor in a file; `start`: its first byte there."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def row(self) -> int:
        """Bytes of a row (of all of a tensor without dimensions)."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a torch dtype."""
    names = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
    return names[str(dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> torch.dtype:
    """Return the inverse of `dtype_name`."""
    import torch

    found: torch.dtype = getattr(torch, DTYPES[name][0])
    return found


def layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Place]]:
    """Return a file's first bytes, and where each tensor lies, in the data's order."""
    order = list(DTYPES)
    names = sorted(tensors, key=lambda n: (order.index(tensors[n][0]), n))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    found, at = {}, 0
    for name in names:
        found[name] = place = Place(*tensors[name], at)
        at += place.nbytes
        offsets = [place.start, at]
        header[name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    places = {n: Place(p.dtype, p.shape, p.start + len(begin)) for n, p in found.items()}
    return begin, places


def read_rows(path: Path, place: Place, first: int, last: int) -> torch.Tensor:
    """Return rows [first, last) of a tensor of a file, on the CPU; no others are read."""
    import torch

    shape = (last - first, *place.shape[1:]) if place.shape else ()
    out = torch.empty(shape, dtype=torch_dtype(place.dtype))
    with path.open("rb") as file:
        file.seek(place.start + first * place.row)
        if file.readinto(out.view(-1).view(torch.uint8).numpy().data) < out.nbytes:
            raise OSError(f"{path} has become shorter")
    return out


def read_layout(path: Path) -> dict[str, Place]:
    """Return where each tensor lies. ValueError for an inconsistent or unknown header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST, size - 8):
            raise ValueError("no valid header")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        found = {
            name: (Place(t["dtype"], tuple(t["shape"]), t["data_offsets"][0]), t["data_offsets"][1])
            for name, t in header.items()
        }
        unknown = sorted({place.dtype for place, _ in found.values()} - set(DTYPES))
        if unknown:
            raise ValueError(f"unknown dtype {', '.join(unknown)}")
        at = 0
        for place, end in sorted(found.values(), key=lambda f: (f[0].start, f[1])):
            if (place.start, end) != (at, at + place.nbytes):
                raise ValueError("tensors do not follow one another")
            at = end
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if at != size - 8 - length:
        raise ValueError(f"{at:,} bytes of tensors in {size - 8 - length:,}")
    return {n: Place(p.dtype, p.shape, p.start + 8 + length) for n, (p, _) in found.items()}
