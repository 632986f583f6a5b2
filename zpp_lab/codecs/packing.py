"""Codes of 2, 3, 4, 6 or 8 bits to bytes and back, one or two planes each.

A plane holds w bits of every code (w = 1, 2, 4 or 8), 8 / w codes in a byte, the first code in
the lowest bits. 2, 4 and 8 bits are one plane. 6 bits are two, the low 4 bits of every code, then
the high 2 bits, and so are 3 bits, the low 2 and the high one: all planes keep power-of-two
strides. A plane is filled up with zero bits to a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGN = 16  # bytes
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def plane_bytes(numel: int, width: int) -> int:
    return align(-(-numel * width // 8))


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of all planes of `numel` codes."""
    return sum(plane_bytes(numel, width) for width in PLANES[bits])


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """uint8 codes [R, n] → out uint8 [R, packed_bytes(n, bits)]."""
    start, shift = 0, 0
    for width in PLANES[bits]:
        end = start + plane_bytes(codes.shape[-1], width)
        plane = codes if width == 8 else (codes >> shift) & ((1 << width) - 1)
        _pack_plane(plane, width, out[..., start:end])
        start, shift = end, shift + width


def unpack(data: Tensor, numel: int, bits: int) -> Tensor:
    """uint8 [R, packed_bytes(numel, bits)] → uint8 codes [R, numel]."""
    codes, start, shift = None, 0, 0
    for width in PLANES[bits]:
        end = start + plane_bytes(numel, width)
        plane = _unpack_plane(data[..., start:end], width)[..., :numel]
        codes = plane if codes is None else codes | plane << shift
        start, shift = end, shift + width
    assert codes is not None
    return codes


def _pack_plane(plane: Tensor, width: int, out: Tensor) -> None:
    per_byte = 8 // width
    used = -(-plane.shape[-1] // per_byte)
    plane = torch.nn.functional.pad(plane, (0, used * per_byte - plane.shape[-1]))
    packed = plane[..., 0::per_byte]
    for i in range(1, per_byte):
        packed = packed | plane[..., i::per_byte] << i * width
    out[..., :used] = packed
    out[..., used:] = 0


def _unpack_plane(data: Tensor, width: int) -> Tensor:
    if width == 8:
        return data
    mask = (1 << width) - 1
    return torch.stack([(data >> i) & mask for i in range(0, 8, width)], dim=-1).flatten(-2)
