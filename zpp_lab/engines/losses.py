"""The held-out loss token by token, so that a mean never depends on how tokens were batched.

Sums are rounded once (`math.fsum`): they are the same in any order, for any split into
documents, batches and ranks.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


def token_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every target in nats, fp32 [B · T], row by row.

    model(inputs) gives logits [B, T, vocab]; inputs, targets: int64 [B, T]. A model that
    `gives_token_losses` is asked for the losses themselves, which it may compute without whole
    logits: model(inputs, targets, each=True).
    """
    if getattr(model, "gives_token_losses", False):
        losses: Tensor = model(inputs, targets, each=True)
        return losses
    logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")


def mean_loss(losses: Tensor) -> float:
    """Mean of fp32 token losses [N], in nats: the exact sum rounded to fp64, divided by N."""
    return total_loss(losses) / losses.numel()


def total_loss(losses: Tensor) -> float:
    """The exact sum of fp32 values [N], rounded once; NaN or infinite where they are."""
    values = losses.tolist()
    total = math.fsum(v for v in values if math.isfinite(v))
    return total + sum(v for v in values if not math.isfinite(v))
