"""The held-out loss token by token, so that a mean never depends on how tokens were batched.

Sums are rounded once (`math.fsum`): they are the same in any order, for any split into
documents, batches and ranks.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from zpp_lab.models.loss import IGNORED


def heldout_size(length: int) -> int:
    """Sequences of a held-out batch, of so many tokens each."""
    return max(1, min(64, 8192 // length))


def token_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every counted target in nats, fp32 [B · T or fewer], row by row.

    model(inputs) gives logits [B, T, vocab]; inputs, targets: int64 [B, T], and IGNORED targets
    are left out. A model that `gives_token_losses` is asked for the losses themselves, which it
    may compute without whole logits: model(inputs, targets, each=True).
    """
    if getattr(model, "gives_token_losses", False):
        losses: Tensor = model(inputs, targets, each=True)
    else:
        logits = model(inputs).float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses[targets.flatten() != IGNORED]


def counted(targets: Tensor) -> int:
    """How many of the targets the loss counts."""
    return int((targets != IGNORED).sum())


def mean_loss(losses: Tensor) -> float:
    """Mean of fp32 token losses [N], in nats: the exact sum rounded to fp64, divided by N."""
    return total_loss(losses) / losses.numel()


def total_loss(losses: Tensor) -> float:
    """The exact sum of fp32 values [N], rounded once; NaN or infinite where they are."""
    values = losses.tolist()
    total = math.fsum(v for v in values if math.isfinite(v))
    return total + sum(v for v in values if not math.isfinite(v))
