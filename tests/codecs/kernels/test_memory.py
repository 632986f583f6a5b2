"""Memories before a codec: arithmetic, stores and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.codecs.kernels.cases import Held
from zpp_lab.codecs import BlockCodec, Noise, RawCodec, SignCodec, encode, kernels
from zpp_lab.codecs.kernels import memory as remembering
from zpp_lab.codecs.kernels.memory import Memory, between
from zpp_lab.codecs.layout import Layout
from zpp_lab.config.codec import MemoryConfig
from zpp_lab.config.compose import compose

TWO = BlockCodec(bits=2, block_size=16)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sent(memory: Memory, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """What the receiver has, and the memory afterwards, for a codec of two bits."""
    y = memory.before(x, m)
    d = TWO.decode(encode(TWO, y), x.shape[1])
    return d, memory.after(y, d, m)


def test_a_residual_loses_nothing_over_steps() -> None:
    """The sum of what arrives is the sum of what was sent, but for the last residual."""
    memory = Memory(store="fp32")
    m = torch.zeros(3, 100)
    given, arrived, plain = torch.zeros(3, 100), torch.zeros(3, 100), torch.zeros(3, 100)
    for step in range(50):
        x = values(3, 100, seed=step) + 0.1
        d, m = sent(memory, x, m)
        given, arrived = given + x, arrived + d
        plain += TWO.decode(encode(TWO, x), 100)
    torch.testing.assert_close(arrived + m, given, rtol=0, atol=1e-4)
    assert (given - arrived).norm() < 0.3 * (given - plain).norm()


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("average", [0.0, 0.8])
def test_each_operation_is_rounded_by_itself(decay: float, average: float) -> None:
    y, d, m = (values(4, 33, seed=i) for i in range(3))
    lost = y.numpy() - d.numpy()
    want = lost * np.float32((1 - average) * decay)
    if average:
        want = m.numpy() * np.float32(average) + want
    assert torch.equal(Memory(decay=decay, average=average).after(y, d, m), torch.from_numpy(want))


def test_loco_is_a_moving_average_of_errors() -> None:
    """m = 0.8 m + 0.2 (y - d), as DeepSpeed's err_beta=0.8."""
    y, d, m = (values(1, 40, seed=i) for i in range(3))
    got = Memory(average=0.8).after(y, d, m)
    torch.testing.assert_close(got, 0.8 * m + 0.2 * (y - d))


@pytest.mark.parametrize(("store", "error"), [("fp32", 0.0), ("bf16", 2**-8), ("8bit", 0.02)])
@pytest.mark.parametrize("numel", [1, 16, 257, 1000])
def test_stores(store: Any, error: float, numel: int) -> None:
    memory, m = Memory(store=store), values(3, numel)
    stored = memory.pack(m)
    assert stored.dtype == memory.dtype
    assert stored.shape == (3, memory.width(numel))
    assert stored[0].nbytes == memory.nbytes(numel)
    back = memory.unpack(stored, numel)
    assert back.dtype == torch.float32
    assert bool(((back - m).abs() <= error * m.abs().amax()).all())
    assert torch.equal(memory.pack(m[1:2]), stored[1:2]), "rows see each other"
    assert torch.equal(memory.pack(back), stored), "storing again changes bits"


def test_bf16_is_rounded_to_nearest_even() -> None:
    m = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20]])
    want = torch.tensor([[1.0, 1 + 4 * 2.0**-8, 1 + 2 * 2.0**-8]])
    assert torch.equal(Memory().unpack(Memory().pack(m), 3), want)


def test_resets_count_steps_from_the_start() -> None:
    assert [s for s in range(10) if Memory(reset_every=4).resets(s)] == [4, 8]
    assert not any(Memory().resets(s) for s in range(10))


def test_settings_of_a_wire_stand_over_its_short_hand() -> None:
    base = MemoryConfig(kind="residual", store="8bit", average=0.8, reset_every=1024)
    assert Memory.of(base) == Memory("8bit", 1.0, 0.8, 1024)
    assert Memory.of(MemoryConfig(store="fp32").over(base)) == Memory("fp32", 1.0, 0.8, 1024)
    assert Memory.of(MemoryConfig(kind="none").over(base)) is None
    assert Memory.of(MemoryConfig()) is None


def two_hops(device: str) -> list[Tensor]:
    """Payloads and memories of both hops, step by step: raw segments, two rotations, a codec that
    the kernels do not know."""
    codecs = [BlockCodec(4, 64, hadamard=32), BlockCodec(2, 16, rounding="stochastic"), SignCodec()]
    after = [BlockCodec(2, 64, hadamard=32), BlockCodec(4, 64, hadamard=64), BlockCodec(8)]
    codecs, after = [*codecs, RawCodec(torch.bfloat16)], [*after, RawCodec(torch.bfloat16)]
    names, numels = ["a", "b", "c", "d"], [1000, 333, 257, 40]
    first, second = (Layout.build(names, numels, own) for own in (codecs, after))
    held = between(first, second)
    rows, memory = 3, Memory("fp32", average=0.5)
    widths = [numels, [s.coded_numel for s in held.segments]]
    mine, sums = (
        Held(dict.fromkeys("abc", memory), {}, dict(zip(names, own, strict=True)), rows)
        for own in widths
    )
    found = []
    for step in range(3):
        noise = Noise(step, (1, 1, 1), (0, 1, 2))
        sources = [values(rows * n - 5, seed=step).to(device) for n in numels]
        sources[3] = sources[3].bfloat16()
        out = torch.empty(rows, first.nbytes, dtype=torch.uint8, device=device)
        remembering.encode(first, sources, noise, out, None, mine)
        total = torch.zeros(rows, first.coded_numel, device=device)
        kernels.decode_sum(first, out[None], total)
        again = torch.empty(rows, second.nbytes, dtype=torch.uint8, device=device)
        given = remembering.encode_sums(first, second, total, noise, again, sums)
        kept = [own.rows[n] for own in (mine, sums) for n in "abc"]
        found += [t.cpu() for t in (out, again, given, *kept)]
    return found


def test_rotated_sums_are_remembered_as_they_are_encoded() -> None:
    found = two_hops("cpu")
    assert found[-3].shape == (3, 1024), "both codecs rotate groups of 32"
    assert found[-2].shape == (3, 333), "only the second one rotates"
    assert all(bool(m.any()) for m in found[-6:-1])  # signs are lossless in 8 bits


def remembered(store: Any, together: bool) -> dict[str, list[Tensor]]:
    """Payloads and memories of two parameters that are alike, of which one comes a step later; in
    one layout, or in one each."""
    codec, memory = BlockCodec(4, 64, rounding="stochastic"), Memory(store, average=0.5)
    numel, rows = 300, 2
    settings, numels = dict.fromkeys("ab", memory), dict.fromkeys("ab", numel)
    first, second = (Held(settings, {}, numels, rows) for _ in range(2))
    found: dict[str, list[Tensor]] = {name: [] for name in "ab"}
    for step in range(3):
        present = ["a", "b"] if step else ["a"]
        noise = Noise(step, (1, 1), (0, 1))
        for names in [present] if together else [[name] for name in present]:
            layout = Layout.build(names, [numel] * len(names), [codec] * len(names))
            seeds = [10 * step + ord(name) for name in names]
            sources = [values(rows * numel, seed=seed) for seed in seeds]
            sums = torch.cat([values(rows, numel, seed=seed + 5) for seed in seeds], dim=1)
            out, again = torch.empty(2, rows, layout.nbytes, dtype=torch.uint8)
            remembering.encode(layout, sources, noise, out, None, first)
            remembering.encode_sums(layout, layout, sums, noise, again, second)
            for s in layout.segments:
                own = slice(s.offset, s.offset + s.nbytes)
                kept = [held.rows[s.name] for held in (first, second)]
                found[s.name] += [out[:, own], again[:, own], *kept]
    return found


@pytest.mark.parametrize("store", ["fp32", "bf16", "8bit"])
def test_parameters_that_are_alike_remember_as_each_does_alone(store: Any) -> None:
    one_by_one = remembered(store, together=False)
    for name, every in remembered(store, together=True).items():
        for got, want in zip(every, one_by_one[name], strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_remember_the_same_bits() -> None:
    for got, want in zip(two_hops("cuda"), two_hops("cpu"), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


BITS, ON = "recipe.grads.bits=4", "recipe.grads.memory.kind=residual"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipe.grads.memory.store=fp32"], "set memory.kind=residual"),
        ([ON], "without a codec"),
        ([BITS, ON, "recipe.grads_inter.codec=none"], "without a codec"),
        (
            ["recipe.weights.bits=4", "recipe.weights.memory.kind=residual"],
            "weights_forward: memory.kind=residual",
        ),
        ([BITS, ON, "recipe.grads.codec=sham"], "codec=sham"),
        ([BITS, ON, "recipe.grads.memory.decay=0"], "memory.decay=0"),
        ([BITS, ON, "recipe.grads.memory.average=1"], "less than 1"),
        ([BITS, ON, "recipe.grads.memory.reset_every=-1"], "use 0"),
        ([BITS, "recipe.grads.memory.kind=reference"], "'none' or 'residual'"),
        ([BITS, ON, "recipe.grads.memory.store=4bit"], "'fp32', 'bf16' or '8bit'"),
        (
            ["model.lora.rank=4", "model.lora.base_codec.memory.kind=residual"],
            "encoded once",
        ),
    ],
)
def test_settings_that_do_nothing_are_errors(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        compose(["recipe=base", *words])
