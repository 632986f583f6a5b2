"""Counter-based noise for stochastic rounding: the same everywhere, for ever.

A draw is a pure function of (seed, step, micro-step, wire, parameter, encoding rank, row,
element), so runs, resumes, devices and engines reproduce it without any state.

Key, 64 bits: BLAKE2s with a digest of 8 bytes (RFC 7693, without a key), read as a little-endian
number, of four numbers of 64 bits each, little-endian, one after the other:

    seed          of the run
    step          from 0; of weights that are evaluated, exported or sent to other nodes after s
                  steps: s
    micro-step    from 0; 0 for weights, the same in every micro-step of a step; the last
                  one for gradients that several micro-steps have added up
    wire          its number in `config/wires.py`

Backward has noise of its own unless it uses what forward gathered (hpZ, stages 1 and 2). A
reduction of one hop is on grads_intra, or with one GPU a node on grads_inter.

Parameter id, 32 bits: BLAKE2s with a digest of 4 bytes of the parameter's name, as
`model.named_parameters()` gives it, in UTF-8, read as a little-endian number. With cluster.tp
"@1" follows the name for the second part of a parameter that is cut, "@2" for the third.

Draws. A block of 128 bits serves 8 neighbouring elements of a segment, 16 bits each:

    counter = (element // 8, row, rank, parameter id)      four 32-bit words
    key     = (low word, high word) of the key
    element e takes word (e % 8) // 2 of the output, its low half when e is even
    u       = (16 bits + 0.5) / 65536                      exact in fp32, inside (0, 1)

element: its place in the row that is quantized, from 0; with a rotation in the rotated row, filling
included. rank: who encodes; in the second hop of a reduction that is the rank of the sending node
with the owner's place in its own. row: whose shard the payload row carries, a rank of the cluster:
of weights the encoding rank, of gradients the one that will own the sum.

Blocks come from Philox4x32 with 7 rounds, which also makes first weights (`models/init.py`). A
block is a pure function of a counter and a key, so any part of a stream can be made anywhere, by
itself, on any device (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011; 7 rounds pass BigCrush there). With counter (c0, c1, c2, c3) and key (k0, k1), all
32-bit words, k0 the key's low one, each round does at once

    c0, c1 = high(c2 * M1) ^ c1 ^ k0, low(c2 * M1)
    c2, c3 = high(c0 * M0) ^ c3 ^ k1, low(c0 * M0)

with the halves of 64-bit products; between rounds W0 and W1 are added to k0 and k1 modulo 2^32.
The output is the counter after the last round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zpp_lab.config.wires import WIRES, Wire

ROUNDS = 7
M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
W0, W1 = 0x9E3779B9, 0xBB67AE85  # key increments
LOW = 0xFFFFFFFF
LANES = 8  # elements served by one counter


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run Philox4x32-7 on int64 tensors that hold 32-bit words; broadcasts its inputs. `key`: 64
    bits, or its low and high word as a tensor [2]."""
    c0, c1, c2, c3 = counter
    k0, k1 = (key & LOW, key >> 32) if isinstance(key, int) else (key[0], key[1])
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1  # int64 wraps; the 64 product bits are right
        c0, c1, c2, c3 = (
            (p1 >> 32) & LOW ^ c1 ^ k0,
            p1 & LOW,
            (p0 >> 32) & LOW ^ c3 ^ k1,
            p0 & LOW,
        )
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1, c2, c3


def parameter_id(name: str) -> int:
    """Return 32 bits of the parameter's name: adding a parameter leaves the others' noise alone."""
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "little")


def noise_key(seed: int, step: int, micro: int, wire: Wire) -> int:
    """Return the 64-bit Philox key of one collective."""
    data = b"".join(w.to_bytes(8, "little") for w in (seed, step, micro, WIRES[wire].number))
    return int.from_bytes(hashlib.blake2s(data, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Noise:
    """Noise of R payload rows: row i is encoded by rank `ranks[i]` for shard `rows[i]`. words: the
    same on the device, int32 [R + 1, 2]: rank and row of each, then the key's low and high word.
    They count in place of `key`, so what a CUDA graph has captured draws as they say."""

    key: int
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    words: Tensor | None = None

    @classmethod
    def of_owners(cls, seed: int, step: int, wire: Wire, ranks: Iterable[int]) -> Noise:
        """Make the noise of weights after `step` steps: each of `ranks` encodes its own shard."""
        own = tuple(ranks)
        return cls(noise_key(seed, step, 0, wire), own, own)

    def __post_init__(self) -> None:
        assert len(self.ranks) == len(self.rows)

    def uniform(self, parameters: tuple[int, ...], numel: int, device: torch.device) -> Tensor:
        """Draw fp32 [R len(parameters), numel] in (0, 1): one parameter below the other, for
        segments of one length, of the parameters with these ids."""
        groups = torch.arange((numel + LANES - 1) // LANES, dtype=torch.int64, device=device)
        rows = _column(self.rows * len(parameters), device)
        ranks = _column(self.ranks * len(parameters), device)
        each = _column(tuple(i for i in parameters for _ in self.rows), device)
        key = self.key if self.words is None else self.words[-1].to(torch.int64) & LOW
        words = philox((groups.expand(len(rows), -1), rows, ranks, each), key)
        halves = torch.stack([h for w in words for h in (w & 0xFFFF, w >> 16)], dim=-1)
        return (halves.flatten(1)[:, :numel].to(torch.float32) + 0.5) * 2.0**-16


@cache
def _column(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n, 1], uploaded once, and never given up: a CUDA graph may read it."""
    return torch.tensor(values, dtype=torch.int64, device=device)[:, None]
