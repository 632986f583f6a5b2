"""Philox4x32, the counter-based generator: rounding noise and first weights are made of its bits.

A block of 128 bits is a pure function of a counter and a key, so any part of a stream can be made
anywhere, by itself, on any device (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011; 7 rounds pass BigCrush there). With counter (c0, c1, c2, c3) and key
(k0, k1), all 32-bit words, k0 the key's low one, each round does at once

    c0, c1 = high(c2 * M1) ^ c1 ^ k0, low(c2 * M1)
    c2, c3 = high(c0 * M0) ^ c3 ^ k1, low(c0 * M0)

with the halves of 64-bit products; between rounds W0 and W1 are added to k0 and k1 modulo 2^32.
The output is the counter after the last round.
"""

from __future__ import annotations

from torch import Tensor

ROUNDS = 7
M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
W0, W1 = 0x9E3779B9, 0xBB67AE85  # key increments
LOW = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7 on int64 tensors that hold 32-bit words; broadcasts its inputs."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & LOW, key >> 32
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
