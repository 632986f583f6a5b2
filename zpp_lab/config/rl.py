"""Settings of reinforcement learning (`task=rl`). No torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from zpp_lab.config.codec import STRICT, AboveZero, Count, NotNegative, Positive, need


@dataclass(frozen=True, config=STRICT)
class RlConfig:
    algorithm: Literal["grpo", "rloo"] = "grpo"
    prompts: Positive = 32  # of a rollout
    samples: Annotated[int, Field(ge=2)] = 8  # completions of each prompt: a group
    steps_per_rollout: Positive = 1  # optimizer steps that learn from a rollout, a part each
    max_new_tokens: Positive = 16
    temperature: AboveZero = 1.0
    top_p: float = 1.0  # 1 and 0: sampled from the whole distribution, as the loss assumes
    top_k: Count = 0
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2  # of the ratio of new to old probability
    kl: NotNegative = 0.0  # weight of the KL penalty to the start's policy
    # truncated importance sampling: by how much training's forward differs from the rollout's
    correction: Literal["none", "token", "sequence"] = "none"
    correction_cap: AboveZero = 2.0
    # grpo: by what the sum over tokens is divided. sequence: each completion's mean counts equally;
    # constant: samples × max_new_tokens
    normalise: Literal["sequence", "token", "constant"] = "token"
    # divide advantages by the rewards' deviation: of the group (grpo), of the rollout (rloo).
    # null: grpo does, rloo does not
    scale: bool | None = None
    gather: Literal["rollout", "token"] = "rollout"  # the weights: once, or for every token
    rewards: list[str] = field(default_factory=list)  # names of the entry points zpp_lab.rewards
    weights: list[float] = field(default_factory=list)  # of the rewards; []: 1 each
    learned: str | None = None  # the reward `learned`: a run of task=reward, or its export
    timeout: AboveZero = 60.0  # seconds of one reward for a rollout, beyond which it scores 0
    heldout_draws: Positive = 1  # completions of each held-out prompt at an evaluation
    # the smoothed reward may fall so far below its best for train.diverge_steps steps; 0 is off
    diverge_below: NotNegative = 0.5

    def __post_init__(self) -> None:
        for name, value, whole in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0)):
            need(
                value == whole,
                f"rl.{name}={value:g}: the loss needs the probabilities of the whole distribution, "
                f"from which rl.{name} would not sample; leave it out, and use rl.temperature",
            )
        need(
            not self.weights or len(self.weights) == len(self.rewards),
            f"rl.weights has {len(self.weights)} values for {len(self.rewards)} rewards: give one "
            "for each of rl.rewards, or none",
        )
        need(
            self.learned != "",
            "rl.learned is empty: set it to a run of task=reward, or leave it out",
        )
        need(
            ("learned" in self.rewards) == bool(self.learned),
            f"rl.learned={self.learned} with rl.rewards={self.rewards}: the reward `learned` and "
            "its model need each other; set rl.learned=RUN and put learned into rl.rewards",
        )
        need(
            len({*self.rewards}) == len(self.rewards),
            f"rl.rewards={self.rewards}: a reward is listed twice; set its weight with rl.weights",
        )
        need(
            self.algorithm == "grpo" or self.normalise == "token",
            f"rl.normalise={self.normalise}: only rl.algorithm=grpo reads it, rloo has one ratio "
            "and one advantage a completion; leave it out",
        )
        need(
            self.algorithm == "grpo" or self.correction != "token",
            "rl.correction=token: rl.algorithm=rloo has one ratio a completion; use sequence",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings before the first step."""
        if self.rewards[:1] != ["learned"]:
            return ()
        return (
            f"rl.rewards={self.rewards}: success is the share of completions to which the first "
            "reward gives 1 or more, and a learned score of 1 has no meaning; put a reward that "
            "checks answers first (with weight 0 in rl.weights it teaches nothing), or read "
            "rl/reward alone",
        )

    @property
    def scales(self) -> bool:
        return self.algorithm == "grpo" if self.scale is None else self.scale

    @property
    def by_sequence(self) -> bool:
        """Whether the loss has one ratio a completion, not one a token."""
        return self.algorithm == "rloo"

    @property
    def weighted(self) -> dict[str, float]:
        """The rewards with their weights."""
        weights = self.weights or [1.0] * len(self.rewards)
        return dict(zip(self.rewards, weights, strict=True))
