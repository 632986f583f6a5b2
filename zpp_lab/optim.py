"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zpp_lab.config import TrainConfig


def adamw(parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (norms and biases have one dimension).

    On a GPU the fused one, which `guarded_step` can hold back without asking the host.
    """
    trained = [p for p in parameters.values() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        **_kind(trained),
    )


def _kind(trained: Sequence[Tensor]) -> dict[str, bool]:
    fused = all(p.device.type == "cuda" for p in trained)
    return {"fused": True} if fused else {"foreach": True}


def guarded_step(optimizer: torch.optim.AdamW, ok: Tensor) -> None:
    """Update the weights, or leave weights and state as they are where `ok` (bool scalar) is
    false. On a GPU the host does not wait to learn which."""
    if optimizer.defaults["fused"]:
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~ok).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()


def zero_state(p: Tensor, fused: bool) -> dict[str, Tensor]:
    """A parameter's state before its first update."""
    step = torch.zeros((), device=p.device if fused else "cpu")
    return {"step": step} | {key: torch.zeros_like(p) for key in STATE if key != "step"}


# AdamW's state of a parameter, as checkpoints name it.
STATE = ("step", "exp_avg", "exp_avg_sq")


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """{state: {parameter name: tensor}}; parameters that were never updated have none."""
    return {
        key: {n: optimizer.state[p][key] for n, p in parameters.items() if p in optimizer.state}
        for key in STATE
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """The inverse of `optimizer_state`."""
    optimizer.state.clear()
    for name, p in parameters.items():
        if name in state["step"]:
            places = {key: state[key][name].to(p.device) for key in STATE if key != "step"}
            step = state["step"][name].to(p.device if optimizer.defaults["fused"] else "cpu")
            optimizer.state[p] = {"step": step, **places}


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then cosine to min_lr_ratio or constant."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    low = train.lr * train.min_lr_ratio
    return low + (train.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
