"""Losses of transformers' models without whole logits: what goes into the head is taken out.

A vocabulary of 152,000 makes 3.5 GiB of logits and their gradients from 2048 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from zpp_lab.models.loss import chunked_losses

_FIX = "set model.loss_chunk=0"


def check_head(model: Any) -> None:
    """ValueError when the head is more than one product."""
    head = model.get_output_embeddings()
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if weight is None or weight.dim() != 2 or bias is not None:
        raise ValueError(
            f"{type(model).__name__}: its head is no matrix alone, which a loss in chunks needs: "
            f"{_FIX}"
        )


def head_losses(model: Any, logits: Callable[[], Tensor], targets: Tensor, chunk: int) -> Tensor:
    """Cross-entropy of every target in nats, fp32 [batch · length], 0 where it is IGNORED.

    logits() runs the model; targets int64 [batch, length]; `chunk` tokens at a time have logits.
    ValueError when the model changes its logits after the head.
    """
    head = model.get_output_embeddings()
    hidden = _before(head, logits, type(model).__name__)
    return chunked_losses(hidden.flatten(0, 1), head.weight, targets.flatten(), chunk)


def _before(head: Any, logits: Callable[[], Tensor], name: str) -> Tensor:
    """What goes into the head, which passes it on for the time being."""
    given: list[Tensor] = []

    def through(x: Tensor) -> Tensor:
        given.append(x)
        return x

    head.forward = through
    try:
        out = logits()
    finally:
        del head.forward
    if len(given) != 1 or out is not given[0]:
        raise ValueError(f"{name} changes its logits after the head, so chunks do not fit: {_FIX}")
    return given[0]
