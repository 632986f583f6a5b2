"""What a rollout's loss needs besides the new weights: advantages, corrections, normalisers.

GRPO (Shao et al. 2024, arXiv:2402.03300) compares a reward with its group's mean, RLOO (Ahmadian
et al. 2024, arXiv:2402.14740) with the mean of the others in its group. Sums are in fp64, and in a
fixed order.

Rollout weights of few bits sample from another distribution than the one that the loss
differentiates. Truncated importance sampling weighs each token, or each sequence, by how much
likelier training's own forward makes it, at most `rl.correction_cap` times.
"""

from __future__ import annotations

import numpy as np

from zpp_lab.config.rl import RlConfig

_EPSILON = 1e-4  # added to a deviation that divides, as TRL does


def advantages(rewards: np.ndarray, rl: RlConfig) -> np.ndarray:
    """Return the advantages of rewards [prompts, samples], fp64. Scaled by the deviation of the
    group (GRPO), or of all advantages after centring them (RLOO)."""
    rewards = rewards.astype(np.float64)
    if rl.algorithm == "grpo":
        centred = rewards - rewards.mean(1, keepdims=True)
        return centred / (rewards.std(1, ddof=1, keepdims=True) + _EPSILON if rl.scales else 1.0)
    others = (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    own = rewards - others
    return (own - own.mean()) / (own.std(ddof=1) + _EPSILON) if rl.scales else own


def penalised(
    rewards: np.ndarray,
    old: np.ndarray,
    reference: np.ndarray | None,
    counted: np.ndarray,
    rl: RlConfig,
) -> np.ndarray:
    """Return rewards [prompts, samples], less RLOO's KL penalty; GRPO has it in its loss."""
    if reference is None or not rl.by_sequence:
        return rewards
    apart = np.where(counted, old.astype(np.float64) - reference, 0.0).sum(1)
    return rewards - rl.kl * apart.reshape(rewards.shape)


def flat_groups(rewards: np.ndarray) -> int:
    """Count the groups of rewards [prompts, samples] that teach nothing: all rewards are equal."""
    return int((rewards == rewards[:, :1]).all(1).sum())


def corrections(
    old: np.ndarray, sampled: np.ndarray, counted: np.ndarray, rl: RlConfig
) -> np.ndarray:
    """Return the weights of truncated importance sampling, fp64 [N, T]. old, sampled:
    log-probabilities by training's forward and by the rollout's; counted: bool, all [N, T]."""
    apart = np.where(counted, old.astype(np.float64) - sampled, 0.0)
    if rl.correction == "none":
        return np.ones_like(apart)
    if rl.correction == "sequence":
        apart = np.broadcast_to(apart.sum(1, keepdims=True), apart.shape)
    return np.minimum(np.exp(np.minimum(apart, 700.0)), rl.correction_cap)


def constants(
    own: np.ndarray,
    old: np.ndarray,
    sampled: np.ndarray,
    counted: np.ndarray,
    reference: np.ndarray | None,
    rl: RlConfig,
) -> np.ndarray:
    """Return the constants of `policy_loss`, fp32 [N, 2 or 4, T]. own: advantages [N]; the
    others as in `corrections`; reference: its log-probabilities, None without a penalty."""
    weights = np.where(counted, _weights(counted, rl), 0.0)
    gain = weights * own[:, None] * corrections(old, sampled, counted, rl)
    if rl.by_sequence:  # a row's gain is the sum over its tokens: the first one has it
        gain = np.where(counted & (counted.cumsum(1) == 1), gain, 0.0)
    parts = [np.where(counted, old, 0.0), gain]
    if reference is not None and not rl.by_sequence:
        parts += [np.where(counted, reference, 0.0), weights * rl.kl]
    return np.stack(parts, 1).astype(np.float32)


def _weights(counted: np.ndarray, rl: RlConfig) -> np.ndarray:
    """Return what a token's part is multiplied with before the step's normaliser divides it."""
    if rl.normalise != "sequence" or rl.by_sequence:
        return np.ones(counted.shape)
    return np.broadcast_to(1 / np.maximum(counted.sum(1, keepdims=True), 1), counted.shape)


def normaliser(counted: np.ndarray, rl: RlConfig) -> int:
    """Return what divides the sum over all tokens of a step, counted bool [N, T]: its sequences
    (by sequence), its counted tokens, or as many as all its completions could have (constant)."""
    if rl.by_sequence or rl.normalise == "sequence":
        return len(counted)
    if rl.normalise == "token":
        return max(1, int(counted.sum()))
    return len(counted) * rl.max_new_tokens
