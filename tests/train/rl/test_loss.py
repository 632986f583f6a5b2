"""The losses of reinforcement learning, against TRL's formulas and against an enumerated task."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zpp_lab.config.load import load
from zpp_lab.config.rl import RlConfig
from zpp_lab.models.objective import policy_loss
from zpp_lab.train.rl.advantages import (
    advantages,
    constants,
    corrections,
    flat_groups,
    normaliser,
    penalised,
)

PROMPTS, SAMPLES, LENGTH = 3, 4, 7
LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}  # ours → TRL's


def settings(**values: Any) -> RlConfig:
    return load(RlConfig, {"rewards": ["any"], "max_new_tokens": 6} | values)


class Case:
    """Random tensors of one rollout; a right-padded completion of each row counts."""

    def __init__(self, seed: int = 0, spread: float = 0.3) -> None:
        made = np.random.default_rng(seed)
        n = PROMPTS * SAMPLES
        self.rewards = made.integers(0, 3, (PROMPTS, SAMPLES)).astype(np.float64)
        lengths = made.integers(1, 7, n)
        self.counted = np.arange(LENGTH)[None] - 1 < lengths[:, None]
        self.counted[:, 0] = False  # a prompt
        shape = (n, LENGTH)
        self.old = (-made.random(shape) * 2).astype(np.float32)
        self.new, self.sampled, self.reference = (
            (self.old + spread * made.standard_normal(shape)).astype(np.float32) for _ in range(3)
        )

    def ours(self, rl: RlConfig, parts: int = 1) -> tuple[float, Tensor]:
        """Return loss and gradient; `parts`: micro-batches, of whose losses the mean is taken."""
        reference = self.reference if rl.kl else None
        rewards = penalised(self.rewards, self.old, reference, self.counted, rl)
        own = advantages(rewards, rl).ravel()
        made = constants(own, self.old, self.sampled, self.counted, reference, rl)
        share = torch.tensor([parts, normaliser(self.counted, rl)])
        new = torch.from_numpy(self.new).requires_grad_()
        losses = -new * torch.from_numpy(self.counted)  # a model gives 0 where nothing counts
        pairs = zip(losses.chunk(parts), torch.from_numpy(made).chunk(parts), strict=True)
        each = [policy_loss(x.flatten(), c, share, rl.clip_ratio, rl.by_sequence) for x, c in pairs]
        loss = torch.stack(each).mean()
        loss.backward()
        assert new.grad is not None
        return float(loss.detach()), new.grad

    def trl_grpo(self, rl: RlConfig) -> tuple[float, Tensor]:
        """The formula of TRL 1.9.0, `_generate_and_score_completions` and `_compute_loss`:
        https://github.com/huggingface/trl/blob/v1.9.0/trl/trainer/grpo_trainer.py"""
        rewards, mask, old, sampled, reference, new = self._tensors()
        grouped = rewards.view(-1, SAMPLES)
        mean = grouped.mean(1).repeat_interleave(SAMPLES)
        own = rewards - mean
        if rl.scales:
            own = own / (grouped.std(1).repeat_interleave(SAMPLES) + 1e-4)
        ratio = torch.exp(new - old)
        own = own[:, None]
        each = -torch.min(ratio * own, ratio.clamp(1 - rl.clip_ratio, 1 + rl.clip_ratio) * own)
        apart = (old - sampled) * mask
        if rl.correction == "sequence":
            apart = apart.sum(-1, keepdim=True)
        if rl.correction != "none":
            each = each * torch.exp(apart).clamp(max=rl.correction_cap)
        if rl.kl:
            each = each + rl.kl * (torch.exp(reference - new) - (reference - new) - 1)
        kind = LOSS_TYPES[rl.normalise]
        if kind == "grpo":
            loss = ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        elif kind == "dapo":
            loss = (each * mask).sum() / mask.sum()
        else:
            loss = (each * mask).sum() / (each.shape[0] * rl.max_new_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        assert new.grad is not None
        return float(loss.detach()), new.grad

    def trl_rloo(self, rl: RlConfig) -> tuple[float, Tensor]:
        """The same of https://github.com/huggingface/trl/blob/v1.9.0/trl/trainer/rloo_trainer.py"""
        rewards, mask, old, _, reference, new = self._tensors()
        if rl.kl:
            rewards = rewards - rl.kl * ((old - reference) * mask).sum(-1)
        grouped = rewards.view(-1, SAMPLES)
        rest = (grouped.sum(1, keepdim=True) - grouped) / (SAMPLES - 1)
        own = rewards - rest.view(-1)
        if rl.scales:
            own = (own - own.mean()) / (own.std() + 1e-4)
        ratio = torch.exp((new * mask).sum(1) - (old * mask).sum(1))
        loss = -torch.min(
            ratio * own, ratio.clamp(1 - rl.clip_ratio, 1 + rl.clip_ratio) * own
        ).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        assert new.grad is not None
        return float(loss.detach()), new.grad

    def _tensors(self) -> tuple[Tensor, ...]:
        parts = (self.rewards.ravel(), self.counted, self.old, self.sampled, self.reference)
        made = [torch.from_numpy(part).double() for part in parts]
        return (*made, torch.from_numpy(self.new).double().requires_grad_())


def check(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    torch.testing.assert_close(ours[1].double(), theirs[1], atol=1e-6, rtol=0)
    assert bool(theirs[1].any())


@pytest.mark.parametrize("normalise", LOSS_TYPES)
@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_grpo_equals_trl(normalise: str, correction: str, scale: bool, kl: float) -> None:
    rl = settings(normalise=normalise, correction=correction, scale=scale, kl=kl)
    check(Case().ours(rl, parts=3), Case().trl_grpo(rl))


@pytest.mark.parametrize("scale", [None, True])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_rloo_equals_trl(scale: bool | None, kl: float) -> None:
    rl = settings(algorithm="rloo", scale=scale, kl=kl)
    check(Case().ours(rl, parts=2), Case().trl_rloo(rl))


def test_rloo_truncates_a_whole_completion() -> None:
    case, plain = Case(), settings(algorithm="rloo")
    rl = settings(algorithm="rloo", correction="sequence", correction_cap=1e-9)
    (loss, _), (other, _) = case.ours(rl), case.ours(plain)
    assert loss == pytest.approx(other * 1e-9, rel=1e-5)


def test_an_importance_weight_is_capped_and_padding_has_none() -> None:
    old, sampled = np.zeros((1, 3)), np.array([[-5.0, 0.5, -900.0]])
    counted = np.array([[True, True, False]])
    by_token = corrections(old, sampled, counted, settings(correction="token"))
    np.testing.assert_allclose(by_token, [[2.0, np.exp(-0.5), 1.0]])
    whole = corrections(old, sampled, counted, settings(correction="sequence", correction_cap=1e3))
    np.testing.assert_allclose(whole, np.full((1, 3), np.exp(4.5)))


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_clipping_is_inert_before_the_weights_change(algorithm: str) -> None:
    case = Case(spread=0.0)
    found = [case.ours(settings(algorithm=algorithm, clip_ratio=clip)) for clip in (0.01, 0.99)]
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert bool(found[0][1].any())
    apart = [
        Case().ours(settings(algorithm=algorithm, clip_ratio=clip))[0] for clip in (0.01, 0.99)
    ]
    assert apart[0] != apart[1]  # once they have


def test_groups_of_equal_rewards_are_counted_and_teach_nothing() -> None:
    rewards = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert flat_groups(rewards) == 2
    for algorithm in ("grpo", "rloo"):
        own = advantages(rewards, settings(algorithm=algorithm))
        assert not own[[0, 2]].any()
        assert own[1].tolist() == pytest.approx(-own[1][::-1])


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_gradient_is_that_of_the_expected_reward(algorithm: str) -> None:
    """A policy of two tokens over three symbols: its expected reward is a sum of nine terms. GRPO
    subtracts a mean that has its own reward in it, so its gradient is (samples - 1) / samples."""
    torch.manual_seed(0)
    first, second = torch.randn(3), torch.randn(3, 3)
    reward = torch.rand(3, 3)
    logits = [first.clone().requires_grad_(), second.clone().requires_grad_()]

    def log_probs(a: Tensor, b: Tensor) -> Tensor:
        one, two = (x.log_softmax(-1) for x in logits)
        return torch.stack((one[a], two[a, b]), -1)

    pairs = torch.tensor(list(product(range(3), range(3)))).T
    expected = (log_probs(*pairs).sum(-1).exp() * reward[tuple(pairs)]).sum()
    true = torch.cat([g.flatten() for g in torch.autograd.grad(expected, logits)])

    rl = settings(algorithm=algorithm, scale=False, normalise="token")
    samples, found = 4, []
    factor = 1.0 if algorithm == "rloo" else samples / (samples - 1)
    for _ in range(400):
        a = torch.multinomial(first.softmax(-1), 16 * samples, replacement=True)
        b = torch.multinomial(second.softmax(-1)[a], 1).squeeze(1)
        new = log_probs(a, b)
        old, counted = new.detach().numpy(), np.ones((len(a), 2), bool)
        own = advantages(reward[a, b].view(-1, samples).numpy(), rl).ravel()
        made = torch.from_numpy(constants(own, old, old, counted, None, rl))
        share = torch.tensor([1, len(a)])  # each completion's tokens together
        loss = policy_loss(-new.flatten(), made, share, rl.clip_ratio, rl.by_sequence)
        grads = torch.autograd.grad(-loss * factor, logits)
        found.append(torch.cat([g.flatten() for g in grads]))
    every = torch.stack(found)
    error = every.std(0) / len(every) ** 0.5
    assert bool(((every.mean(0) - true).abs() <= 3 * error).all())
    assert float(error.max()) < 0.1 * float(true.abs().max())  # it would see a wrong gradient
