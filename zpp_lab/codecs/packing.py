"""Codes of 1 to 16 bits to bytes and back, in planes.

A plane holds w bits of every code (w = 1, 2, 4 or 8), 8 / w codes in a byte, the first code in
the lowest bits. The widest planes come first, with the codes' lowest bits: 2, 4 and 8 bits are one
plane, 6 bits the low 4 of every code, then the high 2, and 11 bits are 8, 2 and 1. So all planes
keep power-of-two strides. A plane is filled up with zero bits to a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGN = 16  # bytes


def planes(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes of codes of so many bits."""
    return (8,) * (bits // 8) + tuple(w for w in (4, 2, 1) if bits & w)


def align(nbytes: int) -> int:
    """Round bytes up to a multiple of 16."""
    return -(-nbytes // ALIGN) * ALIGN


def plane_bytes(numel: int, width: int) -> int:
    return align(-(-numel * width // 8))


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes of all planes of `numel` codes."""
    return sum(plane_bytes(numel, width) for width in planes(bits))


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack codes [R, n], uint8 or any wider integer, into out, uint8 [R, packed_bytes(n, bits)]."""
    start, shift = 0, 0
    for width in planes(bits):
        end = start + plane_bytes(codes.shape[-1], width)
        plane = codes if bits == 8 else (codes >> shift) & ((1 << width) - 1)
        _pack_plane(plane.to(torch.uint8), width, out[..., start:end])
        start, shift = end, shift + width


def unpack(data: Tensor, numel: int, bits: int) -> Tensor:
    """Unpack uint8 [R, packed_bytes(numel, bits)] into codes [R, numel], uint8 or int32."""
    codes, start, shift = None, 0, 0
    for width in planes(bits):
        end = start + plane_bytes(numel, width)
        plane = _unpack_plane(data[..., start:end], width)[..., :numel]
        plane = plane if bits <= 8 else plane.to(torch.int32)
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
