"""Models of transformers with a loss in chunks: the same losses and gradients, no whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hf_cases import CASES, VOCAB, settings
from zpp_lab.config.model import ModelConfig
from zpp_lab.data.packed import IGNORED
from zpp_lab.models import build_model
from zpp_lab.models.loss import token_losses

CHUNK = 5


def pair() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))
    targets = x.roll(-1, 1).clone()
    targets[0, :4] = IGNORED
    return x, targets


def outcome(model: Any, share: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor]:
    x, targets = pair()
    targets = targets if share is not None else targets.clamp_min(0)
    loss = model(x, targets, share)
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    with torch.no_grad():
        return loss.detach(), grads, token_losses(model, x, targets)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        *((kind, torch.tensor([2, 46])) for kind in (*CASES, "gpt2")),
        ("gpt2", None),
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in CASES),
    ],
)
def test_chunks_give_the_whole_logits_losses(kind: str, share: Tensor | None) -> None:
    whole, cut = (build_model(settings(kind, loss_chunk=c), VOCAB, seed=1) for c in (0, CHUNK))
    loss, grads, held = outcome(whole, share)
    other = outcome(cut, share)
    torch.testing.assert_close(other[0], loss, rtol=1e-6, atol=0)
    for one, two in zip(other[1], grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(other[2], held, rtol=1e-6, atol=1e-7)
    x, _ = pair()
    assert torch.equal(cut(x), whole(x))  # without targets: logits, as ever


def of(options: dict[str, Any]) -> ModelConfig:
    return ModelConfig(name="hf", preset="hf", options=options, loss_chunk=CHUNK)


def test_other_heads_are_refused() -> None:
    gemma = {"final_logit_softcapping": 30.0, "head_dim": 8, "intermediate_size": 24}
    gemma |= {"num_key_value_heads": 1, "attention_dropout": 0.0}
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind = {"model_type": "gemma2", "vocab_size": VOCAB, **shape, **gemma}
    model = build_model(of(kind), VOCAB)
    x, targets = pair()
    with pytest.raises(ValueError, match=r"model\.loss_chunk=0"):
        model(x, targets.clamp_min(0))
    biased = {"model_type": "phi", "vocab_size": VOCAB, **shape, "intermediate_size": 24}
    with pytest.raises(ValueError, match=r"model\.loss_chunk=0"):
        build_model(of(biased), VOCAB)
