"""The chunked loss against whole logits: values, gradients, memory, repeats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zpp_lab.config.model import ModelConfig
from zpp_lab.data.packed import IGNORED
from zpp_lab.models import build_model, fused
from zpp_lab.models.loss import (
    chunked_losses,
    chunked_scores,
    cross_entropy,
    token_losses,
    whole_scores,
)

N, DIM, VOCAB = 37, 24, 101


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, DIM, generator=made).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, DIM, generator=made).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCAB, (N,), generator=made)


def grads(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [g.double() for g in torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 1000])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_equals_whole_logits(chunk: int, dtype: torch.dtype, close: float) -> None:
    hidden, head, targets = case(dtype)
    losses = chunked_losses(hidden, head, targets, chunk)
    exact = [t.detach().double().requires_grad_() for t in (hidden, head)]
    wanted = F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="none")
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), wanted, rtol=close, atol=close)
    mine = grads(losses.mean(), hidden, head)
    for a, b in zip(mine, grads(wanted.mean(), *exact), strict=True):
        assert (a - b).abs().max() <= close * b.abs().max()


@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize("shift", [0.0, 50.0])
def test_a_z_loss_is_in_the_gradient_alone(chunk: int, shift: float) -> None:
    hidden, head, targets = case(torch.float32)
    with torch.no_grad():
        head[:, 0] += shift  # logits of one hidden value, and their logsumexp, far from 0
    targets[3:9] = IGNORED
    losses = chunked_losses(hidden, head, targets, chunk, z_loss=1e-2)
    assert torch.equal(losses, chunked_losses(hidden, head, targets, chunk))
    exact = [t.detach().double().requires_grad_() for t in (hidden, head)]
    logits = exact[0] @ exact[1].T
    wanted = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    wanted = wanted + (1e-2 * logits.logsumexp(-1) ** 2).masked_fill(targets == IGNORED, 0)
    weights = torch.linspace(-1, 2, N)
    mine = grads((losses * weights).sum(), hidden, head)
    for a, b in zip(mine, grads((wanted * weights).sum(), *exact), strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_bf16_head_gradient_is_rounded_once() -> None:
    """Chunks of one token: sums in bf16 would lose most of their parts."""
    hidden, head = torch.ones(512, 8).bfloat16(), torch.zeros(4, 8).bfloat16().requires_grad_()
    losses = chunked_losses(hidden, head, torch.zeros(512, dtype=torch.long), 1)
    (grad,) = grads(losses.sum(), head)
    assert torch.equal(grad[:, 0], torch.tensor([-384.0, 128, 128, 128]).double())


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.seen = max(self.seen, t.numel())
        return out


def model(**changes: object) -> object:
    made = {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 4, "ffn": 48, **changes}
    return build_model(ModelConfig(**made), 997, seed=2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_never_makes_whole_logits(tied: bool) -> None:
    x = torch.arange(512).view(4, 128) % 997
    y = x.roll(-1, 1)
    chunked, whole = model(loss_chunk=16, tied_head=tied), model(tied_head=tied)
    with Largest() as watched:
        loss = chunked(x, y)
        loss.backward()
        held_out = token_losses(chunked, x, y)
    assert watched.seen < 512 * 997 / 4
    whole(x, y).backward()
    assert torch.allclose(loss, whole(x, y))
    for a, b in zip(chunked.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6)
    assert held_out.shape == (512,)
    assert torch.allclose(held_out, token_losses(whole, x, y))
    assert chunked(x).shape == whole(x).shape == (4, 128, 997)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_logits_is_the_prediction(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in chunks, and where a kernel gives the losses: from one product, the same counts."""
    hidden = torch.randint(-2, 3, (96, 4), generator=torch.Generator().manual_seed(5)).to(dtype)
    head = torch.randint(-1, 2, (50, 4), generator=torch.Generator().manual_seed(6)).to(dtype)
    targets = torch.arange(96) % 50
    targets[::7] = IGNORED
    logits = hidden @ head.T
    first = [row.index(max(row)) for row in logits.tolist()]
    wanted = [float(t == f) for t, f in zip(targets.tolist(), first, strict=True)]
    tied = sum(row.count(max(row)) > 1 for row in logits.tolist())
    assert tied > 60
    assert 0 < sum(wanted) < 20
    losses, right = whole_scores(logits, targets)
    assert right.tolist() == wanted
    assert torch.equal(losses, cross_entropy(logits, targets, "none"))
    for chunk in (1, 33, 96):
        losses, right = chunked_scores(hidden, head, targets, chunk)
        assert right.tolist() == wanted
        assert torch.equal(losses, chunked_losses(hidden, head, targets, chunk))
    monkeypatch.setattr(fused, "serves", lambda x: True)
    monkeypatch.setattr(fused, "log_probs", lambda x, t: torch.zeros(len(t)))
    assert whole_scores(logits, targets)[1].tolist() == wanted


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_kernel_that_gives_the_targets_alone_leaves_the_rest_to_torch(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch in the kernel's place: loss, gradient, what does not count, and a wrong target."""

    def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)

    logits = torch.randn(33, 50, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50, (33,))
    targets[::5] = IGNORED
    wanted = cross_entropy(logits, targets, reduction)
    monkeypatch.setattr(fused, "serves", lambda x: True)
    monkeypatch.setattr(fused, "log_probs", log_probs)
    found = cross_entropy(logits, targets, reduction)
    assert torch.equal(found, wanted)
    grad = torch.rand_like(wanted)
    one, other = (torch.autograd.grad(y, logits, grad)[0] for y in (found, wanted))
    assert torch.equal(one, other)
    targets[7] = 50
    with pytest.raises(IndexError):
        cross_entropy(logits, targets, reduction)
