"""What a training step minimises."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def objective(model: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of one micro-batch, an fp32 scalar; every engine trains on this one. The
    batch is inputs and targets, and where some targets are IGNORED their share (`loss.py`)."""
    return model(*batch)
