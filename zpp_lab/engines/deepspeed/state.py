"""DeepSpeed's flat shards as whole tensors by name, and back.

ZeRO-3 cuts each parameter's flattened elements into as many chunks as there are ranks, the last one
padded. Its fp32 weights and AdamW's state lie in one flat buffer for each optimizer group, with
one count of updates; the public accessors of `deepspeed.utils` know where in it a parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.collectives.transport import all_gather
from zpp_lab.engines.optim.build import STATE, zero_state

MOMENTS = tuple(key for key in STATE if key != "step")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def own_part(whole: Tensor, rank: int, world: int) -> Tensor:
    """A copy of this rank's chunk of a whole tensor, flat and zero-padded, in its dtype."""
    chunk = -(-whole.numel() // world)
    own = whole.detach().flatten()[rank * chunk : (rank + 1) * chunk]
    part = torch.zeros(chunk, dtype=whole.dtype, device=whole.device)
    part[: own.numel()] = own
    return part


@torch.no_grad()
def states(
    optimizer: Any, parameters: Mapping[str, nn.Parameter], rank: int, world: int
) -> dict[str, Any]:
    """All tensors whole on the CPU of rank 0: weights, optimizer, scaler. Every rank calls it."""
    found: dict[str, Any] = {"weights": {}, "optimizer": {key: {} for key in STATE}}
    counts = _counts(optimizer)
    for name, p in parameters.items():
        for key in (None, *MOMENTS) if counts else (None,):
            whole = _whole(optimizer.get_local_fp32_param(p, key), p, world)
            if rank == 0:
                into = found["weights"] if key is None else found["optimizer"][key]
                into[name] = whole.cpu()
        if counts:
            found["optimizer"]["step"][name] = torch.tensor(counts[0])
    scaler = {k: getattr(optimizer.loss_scaler, k, None) for k in SCALER}
    found["scaler"] = {
        k: torch.tensor(v, dtype=torch.float64) for k, v in scaler.items() if v is not None
    }
    return found if rank == 0 else {}


def _counts(optimizer: Any) -> list[float]:
    """Updates of each flat group; [] before the first."""
    return [float(s["step"]) for s in optimizer.optimizer.state.values() if "step" in s]


def _whole(part: Tensor, p: Any, world: int) -> Tensor:
    every = torch.empty(world * part.numel(), dtype=part.dtype, device=part.device)
    all_gather(every, part.detach().clone())
    return every[: p.ds_numel].view(p.ds_shape)


@torch.no_grad()
def load_states(
    optimizer: Any,
    parameters: Mapping[str, nn.Parameter],
    rank: int,
    world: int,
    state: Mapping[str, Any],
) -> None:
    """The inverse of `states`, from whole tensors on any device."""
    differing = sorted(set(parameters) ^ set(state["weights"]))
    if differing:
        raise ValueError(f"the checkpoint is of another model; it differs in {differing[0]}")
    _make_state(optimizer, parameters, state["optimizer"]["step"])
    for name, p in parameters.items():
        optimizer.set_local_hp_param(own_part(state["weights"][name], rank, world), p)
        for key in MOMENTS if state["optimizer"]["step"] else ():
            part = own_part(state["optimizer"][key][name], rank, world)
            optimizer.set_local_hp_param(part, p, key)
    for key, value in state.get("scaler", {}).items():
        now = getattr(optimizer.loss_scaler, key, None)
        if now is not None:
            setattr(optimizer.loss_scaler, key, type(now)(float(value)))
    _to_training_dtype(optimizer)


def _make_state(
    optimizer: Any, parameters: Mapping[str, nn.Parameter], steps: Mapping[str, Tensor]
) -> None:
    """Room for AdamW's state, with the count of updates that all parameters share."""
    optimizer.optimizer.state.clear()
    counts = {float(step) for step in steps.values()}
    if not counts:
        return
    if len(counts) > 1 or set(steps) != set(parameters):
        raise ValueError(
            "the checkpoint's parameters have been updated a different number of times, and "
            "DeepSpeed counts for all of them at once: go on with engine=fsdp or engine=virtual"
        )
    for flat in optimizer.fp32_partitioned_groups_flat:
        made = zero_state(optimizer.optimizer, flat.detach())
        made["step"].fill_(counts.copy().pop())
        optimizer.optimizer.state[flat] = made


def _to_training_dtype(optimizer: Any) -> None:
    """The shards that are gathered, anew from the fp32 weights, as after an update."""
    optimizer._partition_all_parameters()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
