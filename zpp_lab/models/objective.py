"""What a training step minimises."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zpp_lab.config.rl import RlConfig
from zpp_lab.models.loss import whole_scores
from zpp_lab.models.policy import policy_loss


def objective(model: Callable[..., Tensor], batch: tuple[Tensor, ...], rl: RlConfig) -> Tensor:
    """Return the loss of one micro-batch, an fp32 scalar; every engine trains on this one. The
    batch is inputs and targets, where some targets are IGNORED their share (`loss.py`), and in
    reinforcement learning the constants of `policy.py`."""
    if len(batch) < 4:
        return model(*batch)
    inputs, targets, share, constants = batch
    if getattr(model, "gives_token_scores", False):
        losses = model(inputs, targets, each=True)[0]
    else:
        losses = whole_scores(model(inputs).flatten(0, 1), targets.flatten())[0]
    return policy_loss(losses, constants, share, rl.clip_ratio, rl.by_sequence)
