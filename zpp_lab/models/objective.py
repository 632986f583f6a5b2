"""What a training step minimises: a model's own loss, that of a reward model, or that of
reinforcement learning.

A reward model scores texts. Of a pair of completions of one prompt the loss is the negative
log-probability that the chosen one is preferred, by Bradley and Terry (1952): -log sigmoid of the
difference of their scores (Ouyang et al. 2022, arXiv:2203.02155).

The loss of reinforcement learning is a function of token losses and of per-token constants. A
token's loss is the negative log-probability of a sampled token, so any model that gives token
losses is a policy. What does not depend on the new weights is computed before the step
(`train/rl/advantages.py`): the log-probability before the first step of the rollout (`OLD`), the
advantage times what corrects and normalises it (`GAIN`), and with a KL penalty the reference's
log-probability (`REFERENCE`) and the penalty's weight (`PENALTY`). They stay outside the model,
since a sharding engine may round floats that enter it.

The step's normaliser is the share of `loss.py`, two integers: the mean over ranks and micro-steps
that every engine takes is then the loss of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zpp_lab.config.rl import RlConfig
from zpp_lab.data.packed import IGNORED
from zpp_lab.models.loss import times, whole_scores

OLD, GAIN, REFERENCE, PENALTY = range(4)  # of the constants' second dimension


def objective(model: Callable[..., Tensor], batch: tuple[Tensor, ...], rl: RlConfig) -> Tensor:
    """Return the loss of one micro-batch, an fp32 scalar; every engine trains on this one. The
    batch is inputs and targets, where some targets are IGNORED their share (`loss.py`), and in
    reinforcement learning the constants of `policy_loss`."""
    if len(batch) < 4:
        return model(*batch)
    inputs, targets, share, constants = batch
    if getattr(model, "gives_token_scores", False):
        losses = model(inputs, targets, each=True)[0]
    else:
        losses = whole_scores(model(inputs).flatten(0, 1), targets.flatten())[0]
    return policy_loss(losses, constants, share, rl.clip_ratio, rl.by_sequence)


def pair_losses(scores: Tensor, targets: Tensor, each: bool = False) -> Tensor:
    """Return the mean loss of a batch of pairs, an fp32 scalar. scores: fp32 [B, T]; targets: int64
    [B, T], of each row one that is not IGNORED, where its score is read. Rows 2i and 2i + 1 are the
    chosen and the rejected completion of a prompt. `each`: fp32 [2, B · T], at every place of a
    pair its loss, and 1 where the chosen one has the higher score, else 0."""
    own = (scores * (targets != IGNORED)).sum(1)
    ahead = own[0::2] - own[1::2]
    losses = -F.logsigmoid(ahead)
    if not each:
        return losses.mean()
    rows = torch.stack((losses, (ahead > 0).float())).repeat_interleave(2, 1)
    return rows.repeat_interleave(targets.shape[1], 1)


def policy_loss(
    losses: Tensor, constants: Tensor, share: Tensor, clip: float, by_sequence: bool
) -> Tensor:
    """Return the loss of one micro-batch, an fp32 scalar. losses: fp32 [B · T], 0 where a target
    does not count; constants: fp32 [B, 2 or 4, T], 0 there too; share: int64 [2], see `loss.py`.
    `clip`: how far a ratio may move an advantage from 1, either way. by_sequence: one ratio a row
    (RLOO), else one a token (GRPO). Both directions of the ratio are bounded pessimistically, as
    in PPO: the smaller of the clipped and the unclipped gain counts."""
    new = -losses.view_as(constants[:, OLD])
    change, gain = new - constants[:, OLD], constants[:, GAIN]
    if by_sequence:
        change, gain = change.sum(1), gain.sum(1)
    ratio = change.exp()
    total = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).sum()
    if constants.shape[1] > PENALTY:
        apart = constants[:, REFERENCE] - new
        total = total + (constants[:, PENALTY] * (apart.exp() - apart - 1)).sum()
    return times(total, share)
