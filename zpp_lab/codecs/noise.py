"""Counter-based noise for stochastic rounding: the same everywhere, for ever.

A draw is a pure function of (seed, step, micro-step, wire, parameter, encoding rank, row,
element), so runs, resumes, devices and engines reproduce it without any state.

Key, 64 bits: BLAKE2s with a digest of 8 bytes (RFC 7693, without a key), read as a little-endian
number, of four numbers of 64 bits each, little-endian, one after the other:

    seed          of the run
    step          from 0; of weights that are evaluated or exported after s steps: s
    micro-step    from 0; 0 for weights, which every micro-step of a step gathers alike; the last
                  one for gradients that several micro-steps have added up
    wire          0 weights_forward, 1 weights_backward, 2 grads_intra, 3 grads_inter

Backward has noise of its own unless it uses what forward gathered (hpZ, stages 1 and 2). A
reduction of one hop is on grads_intra, or with one GPU a node on grads_inter.

Parameter id, 32 bits: BLAKE2s with a digest of 4 bytes of the parameter's name, as
`model.named_parameters()` gives it, in UTF-8, read as a little-endian number.

Bits come from Philox4x32 with 7 rounds (`philox.py` says how). One block of 128 bits serves 8
neighbouring elements of a segment, 16 bits each:

    counter = (element // 8, row, rank, parameter id)      four 32-bit words
    key     = (low word, high word) of the key
    element e takes word (e % 8) // 2 of the output, its low half when e is even
    u       = (16 bits + 0.5) / 65536                      exact in fp32, inside (0, 1)

element: its place in the row that is quantized, from 0; with a rotation in the rotated row, filling
included. rank: who encodes; in the second hop of a reduction that is the rank of the sending node
with the owner's place in its own. row: whose shard the payload row carries, a rank of the cluster:
of weights the encoding rank, of gradients the one that will own the sum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.config import WIRES, Wire
from zpp_lab.philox import philox

LANES = 8  # elements served by one counter


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
