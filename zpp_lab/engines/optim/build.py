"""AdamW and the learning-rate schedule.

Projections into the residual stream may learn at a multiple of the rate (`train.residual_lr`), as
what they give adds up over depth. `set_rate` applies it in every step, so checkpoints hold no
rates and a run resumes with its config's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.residence import Plane
from zpp_lab.config.schema import TrainConfig
from zpp_lab.engines.optim import DTYPES, CompactAdamW, ShardAdamW, kind_of
from zpp_lab.engines.optim.shards import is_sharded
from zpp_lab.engines.optim.states import MOMENTS
from zpp_lab.models.params import feeds_residual, param_class

AdamW = torch.optim.AdamW | CompactAdamW
# AdamW's state of a parameter, as checkpoints name it; in 8 bits with scales too.
STATE = ("step", *MOMENTS)
Parameters = Mapping[str, nn.Parameter]  # by name
OptimizerState = dict[str, dict[str, Tensor]]  # {key: {parameter name: tensor}}


def adamw(
    parameters: Mapping[str, nn.Parameter],
    train: TrainConfig,
    seed: int = 0,
    far: Mapping[Plane, Collection[str]] | None = None,
    low: Mapping[str, Tensor] | None = None,
    high: Mapping[str, Tensor] | None = None,
) -> AdamW:
    """Build AdamW with weight decay on matrices only (norms and biases have one dimension), and a
    rate of its own for projections into the residual stream (train.residual_lr).

    With states and masters in fp32 torch's own, on a GPU the fused one; of DTensors their shards
    alone are updated. `begin` can hold back the fused one and ours without asking the host. `seed`:
    of the rounding of smaller states. `far`: names of parameters, by what of them lies in host
    memory. `low`: the low planes of parameters that are high ones; `high`: those that lie in host
    memory, padded. ValueError when there is nothing to train, or no such projection.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter requires a gradient: unfreeze some parameters")
    if train.residual_lr != 1:
        _check_projections(parameters, trained, train.residual_lr)
    groups = _groups(trained, train)
    assert train.beta2_tokens is None, "tokens a step are known to Config.optimization"
    betas = (train.beta1, train.beta2)
    if train.optimizer_state != "fp32" or train.masters == "split":
        settings = (train.optimizer_state, seed, train.lr, betas, train.eps)
        planes: list[dict[Tensor, Tensor]] = [
            {parameters[name]: plane for name, plane in (each or {}).items()}
            for each in (low, high)
        ]
        there = {k: {trained[n] for n in names if n in trained} for k, names in (far or {}).items()}
        return CompactAdamW(groups, *settings, far=there, low=planes[0], high=planes[1])
    every = list(trained.values())
    made = ShardAdamW if any(map(is_sharded, every)) else torch.optim.AdamW
    kind = {"fused" if all(p.device.type == "cuda" for p in every) else "foreach": True}
    return made(groups, lr=train.lr, betas=betas, eps=train.eps, **kind)


def _check_projections(parameters: Parameters, trained: Parameters, factor: float) -> None:
    """ValueError where no projection into the residual stream is known, or half of a block's."""
    names = [name for name, p in parameters.items() if p.ndim > 1]
    known = {param_class(name) for name in names if feeds_residual(name)}
    half = {"attention", "mlp"} & {param_class(name) for name in names} - known
    slow = any(feeds_residual(name) for name, p in trained.items() if p.ndim > 1)
    if half or not slow:
        whose = f"matrix of the model's {min(half)}" if half else "trained matrix of the model"
        raise ValueError(
            f"train.residual_lr={factor}: no {whose} is known by its name to project into the "
            "residual stream; set train.residual_lr=1"
        )


def _groups(trained: Mapping[str, nn.Parameter], train: TrainConfig) -> list[dict[str, Any]]:
    """Group parameters that share settings; `factor` is what `set_rate` multiplies the rate by."""
    matrices = {name: p for name, p in trained.items() if p.ndim > 1}
    slow = {name for name in matrices if train.residual_lr != 1 and feeds_residual(name)}
    decay = train.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in matrices.items() if name not in slow], "weight_decay": decay},
        {"params": [matrices[name] for name in matrices if name in slow], "weight_decay": decay},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups[1] |= {"factor": train.residual_lr, "lr": train.lr * train.residual_lr}
    return [group for group in groups if group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Take the next step at the learning rate `lr`, some parameters at a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("factor", 1.0)


def update(optimizer: AdamW, number: int, ok: Tensor | None = None) -> None:
    """Update the weights in step `number`, unless `ok`, on the device, is false."""
    if isinstance(optimizer, CompactAdamW):
        optimizer.step(number=number, ok=ok)
        return
    if ok is not None:
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~ok).float()  # type: ignore[attr-defined]
    optimizer.step()


def begin(
    optimizer: AdamW,
    ok: Tensor,
    number: int,
    factor: Tensor | None = None,
    whole: bool = True,
    every: Sequence[Tensor] = (),
) -> Callable[[Mapping[Tensor, Tensor]], list[Any] | None]:
    """Begin step `number` of shards; returns what updates some parameters, each once, with
    gradients times `factor`, or nothing where `ok` is false. Where weights lie on the CPU the host
    asks. `whole`: as in `CompactAdamW.update`. `every`: all that it will update, if that is known
    (`CompactAdamW.prepare`)."""
    assert isinstance(optimizer, CompactAdamW | ShardAdamW)
    decides = on_device(optimizer)
    if not decides and not bool(ok):
        return lambda grads: None
    optimizer.begin(number, ok if decides else None, factor)
    if isinstance(optimizer, CompactAdamW):
        optimizer.prepare(every)
        return partial(optimizer.update, whole=whole)
    return optimizer.update


def on_device(optimizer: AdamW) -> bool:
    """Return whether the optimizer's kernels take the decision themselves."""
    if isinstance(optimizer, CompactAdamW):
        return optimizer.device.type == "cuda"
    return bool(optimizer.defaults["fused"])


def zero_state(optimizer: AdamW, p: Tensor) -> dict[str, Tensor]:
    """Return a parameter's state before its first update."""
    if isinstance(optimizer, CompactAdamW | ShardAdamW):
        return optimizer.zero_state(p)
    step = torch.zeros((), device=p.device if on_device(optimizer) else "cpu")
    return {"step": step} | {key: torch.zeros_like(p) for key in MOMENTS}


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> OptimizerState:
    """Return tensors by key and parameter; parameters that were never updated have none."""
    found: OptimizerState = {key: {} for key in STATE}
    for name, p in parameters.items():
        for key, value in optimizer.state[p].items() if p in optimizer.state else ():
            found.setdefault(key, {})[name] = value
    return found


def load_optimizer_state(
    optimizer: AdamW, parameters: Parameters, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Load what `optimizer_state` returned. ValueError when the states are kept otherwise."""
    dtypes = {k: {n: t.dtype for n, t in named.items()} for k, named in state.items()}
    check_state(optimizer, parameters, dtypes)
    optimizer.state.clear()
    for name, p in parameters.items():
        if name in state.get("step", {}):
            own = zero_state(optimizer, p)
            for key, value in own.items():
                value.copy_(state[key][name])
            optimizer.state[p] = own


def check_state(
    optimizer: AdamW, parameters: Parameters, found: Mapping[str, Mapping[str, torch.dtype]]
) -> None:
    """ValueError when a checkpoint with these dtypes of states {key: {parameter: dtype}} keeps
    them otherwise than `optimizer`; nothing is ever converted."""
    kind = optimizer.kind if isinstance(optimizer, CompactAdamW) else "fp32"
    for name, dtype in found.get("exp_avg", {}).items():
        if name not in parameters:
            raise ValueError(f"the checkpoint is of another model; {name} differs")
        wanted = DTYPES[kind_of(parameters[name].shape, kind)]
        there = next((k for k, d in DTYPES.items() if d == dtype), kind)
        if dtype != wanted and there != kind:
            raise ValueError(
                f"the checkpoint has optimizer states in {there}, this run in {kind}: set "
                f"train.optimizer_state={there}, or take its weights alone (model.start=CHECKPOINT)"
            )


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of step `step` (from 0): linear warm-up to train.lr, then the schedule.

    `cosine` and `linear` fall to min_lr_ratio from there to the end; `constant` stays. `wsd`
    (warm-up, stable, decay) stays, and falls linearly over its last `train.decay` steps: Hu et al.
    2024, "MiniCPM", arXiv:2404.06395; decays of a fifth of the steps are about as good as a cosine
    over all of them: Hägele et al. 2024, arXiv:2405.18392.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    first = train.steps - train.decay if train.schedule == "wsd" else train.warmup_steps
    done = min(1.0, max(0, step - first) / max(1, train.steps - first))
    low = train.lr * train.min_lr_ratio
    if train.schedule == "cosine":
        return low + (train.lr - low) * 0.5 * (1 + math.cos(math.pi * done))
    return low + (train.lr - low) * (1 - done)
