"""Counter-based noise for stochastic rounding: the same everywhere, for ever.

A draw is a pure function of (seed, step, micro-step, wire, parameter, encoding rank, row,
element), so runs, resumes, devices and engines reproduce it without any state.

Bits come from Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011; 7 rounds pass BigCrush there). One block of 128 bits
serves 8 neighbouring elements of a segment, 16 bits each:

    counter = (element // 8, row, rank, parameter id)      four 32-bit words
    key     = (low word, high word) of a 64-bit key made from seed, step, micro-step and wire
    element e takes word (e % 8) // 2 of the output, its low half when e is even
    u       = (16 bits + 0.5) / 65536                       exact in fp32, inside (0, 1)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.config import WIRES, Wire

ROUNDS = 7
LANES = 8  # elements served by one counter
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32 multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments
_LOW = 0xFFFFFFFF


def parameter_id(name: str) -> int:
    """32 bits of the parameter's name: adding a parameter leaves the others' noise alone."""
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "little")


def noise_key(seed: int, step: int, micro: int, wire: Wire) -> int:
    """The 64-bit Philox key of one collective."""
    words = (seed, step, micro, WIRES.index(wire))
    data = b"".join(w.to_bytes(8, "little") for w in words)
    return int.from_bytes(hashlib.blake2s(data, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Noise:
    """Noise of R payload rows: row i is encoded by rank `ranks[i]` for shard `rows[i]`."""

    key: int
    ranks: tuple[int, ...]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.ranks) == len(self.rows)

    def uniform(self, parameter: int, numel: int, device: torch.device) -> Tensor:
        """fp32 [R, numel] in (0, 1), for the segment of the parameter with this id."""
        groups = torch.arange((numel + LANES - 1) // LANES, dtype=torch.int64, device=device)
        rows = torch.tensor(self.rows, dtype=torch.int64, device=device)[:, None]
        ranks = torch.tensor(self.ranks, dtype=torch.int64, device=device)[:, None]
        words = philox(
            (groups.expand(len(self.rows), -1), rows, ranks, torch.full_like(rows, parameter)),
            self.key,
        )
        halves = torch.stack([h for w in words for h in (w & 0xFFFF, w >> 16)], dim=-1)
        bits = halves.flatten(1)[:, :numel].to(torch.float32)
        return (bits + 0.5) * 2.0**-16


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7 on int64 tensors that hold 32-bit words; broadcasts its inputs."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> 32
    for _ in range(ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1  # int64 wraps; the 64 product bits are right
        c0, c1, c2, c3 = (
            (p1 >> 32) & _LOW ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> 32) & _LOW ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3
