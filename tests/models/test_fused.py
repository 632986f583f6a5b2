"""The decoder's fused kernels against torch's operators, to the bit, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zpp_lab.data.packed import IGNORED
from zpp_lab.models import fused
from zpp_lab.models.llama import Rope, complex_product
from zpp_lab.models.loss import cross_entropy

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.bfloat16, torch.float16]


def same(one: Tensor, other: Tensor) -> bool:
    """In every bit, but for the payloads of NaN."""
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    equal = one.view(bits) == other.view(bits)
    return bool((equal | (one.isnan() & other.isnan())).all())


def wide(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values over many binades, with gradients."""
    size = torch.exp(3 * torch.randn(*shape[:-1], 1, device="cuda"))
    return (torch.randn(*shape, device="cuda") * size).to(dtype).requires_grad_()


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 512, 6, 64), (5, 77, 3, 48), (1, 1, 1, 2), (2, 64, 2, 128)])
def test_a_rotation_has_the_bits_of_the_complex_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    x = wide(*shape, dtype=dtype)
    table = Rope(shape[3], 10000.0).table(shape[1], x.device)
    wanted = complex_product(x.float().unflatten(-1, (-1, 2)), table).flatten(-2).to(dtype)
    assert fused.serves(x)
    found = fused.rotated(x, table)
    assert same(found, wanted)
    grad = torch.randn(shape[0], shape[2], shape[1], shape[3], device="cuda").to(dtype)
    turned = grad.transpose(1, 2)  # as attention hands it back
    one, other = (torch.autograd.grad(y, x, turned)[0] for y in (found, wanted))
    assert same(one, other)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_has_the_bits_of_its_two_operators(dtype: torch.dtype) -> None:
    """All finite values, infinities and NaN too, as gates."""
    every = torch.arange(2**16, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype)
    gate = torch.cat([every, wide(1000, 333, dtype=dtype).detach().flatten()]).requires_grad_()
    up, grad = wide(gate.numel(), 1, dtype=dtype).flatten(), wide(gate.numel(), 1, dtype=dtype)
    up, grad = up.detach().requires_grad_(), grad.detach().flatten()
    wanted, found = F.silu(gate) * up, fused.swiglu(gate, up)
    assert same(found, wanted)
    with torch.no_grad():
        assert same(fused.swiglu(gate, up), wanted)
    ours, theirs = (torch.autograd.grad(y, (gate, up), grad) for y in (found, wanted))
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@on_gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("vocab", [3, 500, 2048, 4096, 5001, 32000, 70000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_has_the_bits_of_torchs(
    dtype: torch.dtype, vocab: int, reduction: str
) -> None:
    """Of rows in no power of two, of which some do not count, some hold infinities or NaN."""
    logits = (5 * torch.randn(777, vocab, device="cuda")).to(dtype)
    targets = torch.randint(0, vocab, (777,), device="cuda")
    targets[::7] = IGNORED
    if reduction == "none":  # a mean over such rows would be NaN
        logits[5, 1], logits[6, 2], logits[8, 0] = torch.inf, torch.nan, -torch.inf
    logits.requires_grad_()
    assert fused.serves(logits)
    found = cross_entropy(logits, targets, reduction)
    wanted = F.cross_entropy(logits.float(), targets, reduction=reduction, ignore_index=IGNORED)
    assert same(found.detach(), wanted.detach())
    grad = torch.randn_like(wanted)
    one, other = (torch.autograd.grad(y, logits, grad)[0] for y in (found, wanted))
    assert same(one, other)


@on_gpu
def test_sums_of_rows_are_torchs_only_where_seen_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference study's vocabulary is one of them, and one that torch adds otherwise is not."""
    at = torch.bfloat16, torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(fused, "_SEEN", {})
    assert fused._known_order(4096, *at)
    assert not fused._known_order(500, *at)


def test_other_tensors_are_left_to_torch() -> None:
    assert not fused.serves(torch.zeros(4, dtype=torch.bfloat16))  # on the CPU


@on_gpu
def test_what_the_kernels_cannot_take_is_left_to_torch() -> None:
    x = torch.zeros(4, 6, device="cuda", dtype=torch.bfloat16)
    assert fused.serves(x)
    assert not fused.serves(x.t())
    assert not fused.serves(x.float())
    assert not fused.serves(x[:0])
