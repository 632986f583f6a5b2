"""Noise, parameter ids and signs as the docstrings of `codecs/noise.py` and `codecs/hadamard.py`
give them: made once more from these words alone, with Python's integers."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.codecs import BlockCodec, Noise, SegmentNoise, encode, noise_key, parameter_id
from zpp_lab.codecs.hadamard import SIZES, signs
from zpp_lab.engines.optim.states import row_noise

U32 = 2**32
WIRES = ("weights_forward", "weights_backward", "grads_intra", "grads_inter")
U63, SMALL = st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)
NAMES = st.text(min_size=1, max_size=40)


def number(text: bytes, size: int) -> int:
    digest = hashlib.blake2s(text, digest_size=size).digest()
    return sum(byte << 8 * i for i, byte in enumerate(digest))


def eight_bytes(value: int) -> bytes:
    return bytes(value >> 8 * i & 255 for i in range(8))


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    (c0, c1, c2, c3), (k0, k1) = counter, (key % U32, key // U32)
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 // U32 ^ c1 ^ k0, p1 % U32, p0 // U32 ^ c3 ^ k1, p0 % U32
        k0, k1 = (k0 + 0x9E3779B9) % U32, (k1 + 0xBB67AE85) % U32
    return c0, c1, c2, c3


def sixteen_bits(words: tuple[int, ...], element: int) -> int:
    word = words[element % 8 // 2]
    return word // 65536 if element % 2 else word % 65536


def drawn(
    seed: int, step: int, micro: int, wire: str, name: str, rank: int, row: int, element: int
) -> float:
    words = (seed, step, micro, WIRES.index(wire))
    key = number(b"".join(map(eight_bytes, words)), 8)
    counter = (element // 8, row, rank, number(name.encode("utf-8"), 4))
    return (sixteen_bits(philox(counter, key), element) + 0.5) / 65536


@given(U63, SMALL, SMALL, st.sampled_from(WIRES), NAMES, SMALL, SMALL, st.integers(1, 30))
def test_a_draw(seed, step, micro, wire, name, rank, row, numel) -> None:  # type: ignore[no-untyped-def]
    noise = Noise(noise_key(seed, step, micro, wire), (rank, 7), (row, 9))
    found = noise.uniform((parameter_id(name),), numel, torch.device("cpu"))
    for i, (r, w) in enumerate(((rank, row), (7, 9))):
        wanted = [drawn(seed, step, micro, wire, name, r, w, e) for e in range(numel)]
        assert found[i].tolist() == wanted


@pytest.mark.parametrize("hadamard", [0, 16])
def test_elements_are_those_of_the_row_that_is_quantized(hadamard: int) -> None:
    """Of 21 elements, or of the 32 that a rotation makes of them."""
    codec = BlockCodec(8, 64, True, "stochastic", hadamard=hadamard)
    x = torch.arange(21, dtype=torch.float32)[None] - 10
    noise = SegmentNoise(Noise(noise_key(3, 5, 1, "grads_inter"), (2,), (6,)), parameter_id("a.b"))
    levels, scale, _ = codec.levels_and_scales(encode(codec, x, noise), 21)
    values = codec.rotation.forward(x) if codec.rotation else x
    inverse = 1 / scale[0, 0]
    for e, value in enumerate(values[0]):
        u = torch.tensor(drawn(3, 5, 1, "grads_inter", "a.b", 2, 6, e), dtype=torch.float32)
        assert levels[0, 0, e] == min(127, math.floor(value * inverse + u))


def test_signs() -> None:
    key = sum(ord(letter) << 8 * i for i, letter in enumerate(reversed("ZPP_LAB")))
    words = philox((0, 0, 0, 0), key) + philox((1, 0, 0, 0), key)
    wanted = [-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(256)]
    for size in SIZES:
        assert signs(size).tolist() == wanted[:size]


def test_the_optimizers_noise() -> None:
    key = number(b"optimizer" + eight_bytes(11) + eight_bytes(4), 8)
    wanted = [sixteen_bits(philox((e // 8, 0, 0, 0), key), e) for e in range(21)]
    assert row_noise(11, 4, 21, torch.device("cpu")).tolist() == wanted
