"""A block that computes itself again: the bits of one that keeps everything, at less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model, llama
from zpp_lab.models.start import materialize

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
Grads = dict[str, Tensor]


def model(
    checkpoint: bool, device: str, dtype: torch.dtype, dim: int = 64, **more: bool
) -> nn.Module:
    shape: dict[str, Any] = {"dim": dim, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 96, **more}
    cfg = ModelConfig(**shape, checkpoint_activations=checkpoint)
    made = build_model(cfg, 64, device="meta")
    materialize(made, device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return made.to(dtype)


def passed(made: nn.Module, device: str, micro_batches: int = 2) -> tuple[list[Tensor], Grads]:
    """Losses, and gradients added over micro-batches."""
    losses = []
    for seed in range(micro_batches):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss = made(tokens.to(device), tokens.roll(-1).to(device))
        loss.backward()
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in made.named_parameters() if p.grad is not None}


def same(one: tuple[list[Tensor], Grads], other: tuple[list[Tensor], Grads]) -> None:
    assert [a.item() for a in one[0]] == [b.item() for b in other[0]]
    assert set(one[1]) == set(other[1])
    assert [n for n in one[1] if not torch.equal(one[1][n], other[1][n])] == []


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_those_without_checkpointing(
    device: str, dtype: torch.dtype, qk_norm: bool
) -> None:
    kept = passed(model(False, device, dtype, qk_norm=qk_norm), device)
    assert len(kept[1]) == 3 * (11 if qk_norm else 9) + 3
    same(passed(model(True, device, dtype, qk_norm=qk_norm), device), kept)


def test_only_the_input_is_kept_and_the_last_product_is_not_computed_again() -> None:
    made = model(True, "cpu", torch.float32)
    products = {"w_gate": 0, "w_down": 0}

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            for name in products:
                weight = getattr(made.layers[1].mlp, name).weight
                if "mm" in str(func) and any(shares(a, weight) for a in args):
                    products[name] += 1
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    saved: list[int] = []
    x = torch.randn(1, 16, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t,
        lambda t: t,  # type: ignore[func-returns-value]
    ):
        out = made.layers[1](x)
    assert saved == [x.numel()]
    with Counted():
        out.sum().backward()
    assert products == {"w_gate": 2, "w_down": 1}  # again and backward; backward alone


def shares(a: object, weight: Tensor) -> bool:
    return isinstance(a, Tensor) and a.data_ptr() == weight.data_ptr()


def test_a_hook_on_what_backward_leaves_out_counts_in_both() -> None:
    both = []
    for checkpoint in (False, True):
        made = model(checkpoint, "cpu", torch.float32)
        made.layers[1].mlp.register_forward_hook(lambda module, inputs, out: 2 * out)
        both.append(passed(made, "cpu"))
    same(*both)


def test_gradients_of_gradients_are_an_error() -> None:
    made = model(True, "cpu", torch.float32)
    tokens = torch.randint(0, 64, (1, 8))
    with pytest.raises(RuntimeError, match="checkpoint_activations=false"):
        made(tokens, tokens).backward(create_graph=True)


def test_a_frozen_weight_gets_no_gradient_and_others_get_theirs() -> None:
    kept, again = (model(c, "cpu", torch.float32) for c in (False, True))
    for made in (kept, again):
        made.layers[1].mlp.w_down.weight.requires_grad_(False)
    same(passed(again, "cpu"), passed(kept, "cpu"))
    assert "layers.1.mlp.w_down.weight" not in dict(passed(again, "cpu")[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_peak_is_one_residual_above_torchs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, residual = [], 8 * 1024 * 256 * 2
    for own in (True, False):
        if not own:
            monkeypatch.setattr(llama, "can_recompute", lambda *_: False)
        block = model(True, "cuda", torch.bfloat16, dim=256).layers[0]
        x = torch.randn(8, 1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            block(x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del block, x
    assert peaks[0] <= peaks[1] + residual + 2**16  # 2**16 is far less than any activation
