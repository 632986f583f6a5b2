"""What the host needs to start a step's work: a model so small that nothing else bounds it.

The same model runs alone and under FSDP2. What FSDP2 adds to a forward is a gather of each unit;
what it adds to a backward, a gather and a reduction.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.bench.calibrate_compute import drawn
from zpp_lab.bench.step_engines import PlainFsdp2
from zpp_lab.config import ClusterConfig, Config, DataConfig, ModelConfig, RecipeConfig, TrainConfig
from zpp_lab.cost.machine import Host
from zpp_lab.cost.model import plan_of
from zpp_lab.engines.norm import squares

REPEATS = 7
TOKENS, VOCABULARY = 16, 256  # no fewer than bytes
NORMED_LAYERS = 8


def host(layers: int, width: int, normed: int, modes: Sequence[str], device: torch.device) -> Host:
    """Every rank calls it; seconds are this rank's."""
    alone = {mode: _blocks(layers, width, mode, device) for mode in modes}
    sharded = _sharded(layers, width, device)
    gather = max(0.0, (sharded[0] - alone["eager"][2]) / (layers + 1))
    backward = max(0.0, sharded[1] - alone["eager"][3])
    reduce = max(0.0, (backward - layers * gather) / (layers + 1))
    blocks = layers * sum(alone["eager"][:2])
    rest = sharded[2] - blocks - (2 * layers + 1) * gather - (layers + 1) * reduce
    return Host(
        block_forward_s={mode: times[0] for mode, times in alone.items()},
        block_backward_s={mode: times[1] for mode, times in alone.items()},
        gather_s=gather,
        reduce_s=reduce,
        step_s=max(0.0, rest),
        norm_s=_norm(normed, device),
    )


def settings(layers: int, width: int) -> ModelConfig:
    return ModelConfig(
        dim=width, ffn=2 * width, heads=2, kv_heads=2, layers=layers, vocab_size=VOCABULARY
    )


def _config(model: ModelConfig) -> Config:
    cluster = ClusterConfig(nodes=1, gpus_per_node=dist.get_world_size())
    train = TrainConfig(batch_size=1, param_dtype="bf16", reduce_dtype="bf16")
    return Config(
        model=model,
        data=DataConfig(seq_len=TOKENS),
        recipe=RecipeConfig(name="zero3"),
        cluster=cluster,
        train=train,
    )


def _blocks(
    layers: int, width: int, mode: str, device: torch.device
) -> tuple[float, float, float, float]:
    """Seconds of a block's forward and backward, and of the whole model's."""
    model = drawn(settings(layers, width), device).bfloat16()
    few = drawn(settings(1, width), device).bfloat16()
    if mode == "compiled":
        from zpp_lab.engines.compiled import compile_units  # loads the compiler

        compile_units([*model.units(), *few.units()], False)
    whole, one = _pass_seconds(model, device), _pass_seconds(few, device)
    if layers == 1:
        return whole[0], whole[1], whole[0], whole[1]
    forward, backward = (max(0.0, (a - b) / (layers - 1)) for a, b in zip(whole, one, strict=True))
    return forward, backward, whole[0], whole[1]


def _sharded(layers: int, width: int, device: torch.device) -> tuple[float, float, float]:
    """Under FSDP2: seconds of forward, backward and a whole step."""
    timed = PlainFsdp2(_config(settings(layers, width)), device)
    forward, backward = _pass_seconds(timed.model, device)
    batch = _tokens(torch.device("cpu"))
    step = _host_seconds(lambda: timed.step(0, lambda rank, micro: (batch, batch)), device)
    return forward, backward, step


def _pass_seconds(model: torch.nn.Module, device: torch.device) -> tuple[float, float]:
    tokens, losses = _tokens(device), []

    def forward() -> None:
        losses.append(model(tokens, tokens))

    def backward() -> None:
        losses.pop().backward()
        model.zero_grad(set_to_none=True)

    found: list[tuple[float, float]] = []
    for _ in range(REPEATS + 2):
        found.append((_once(forward, device), _once(backward, device)))
    own = found[2:]
    return statistics.median(f for f, _ in own), statistics.median(b for _, b in own)


def _host_seconds(call: Callable[[], object], device: torch.device) -> float:
    times = [_once(call, device) for _ in range(REPEATS + 2)]
    return statistics.median(times[2:])


def _once(call: Callable[[], object], device: torch.device) -> float:
    """Until the call returns: the device is free before and is not waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _norm(width: int, device: torch.device) -> float:
    """Of shards as wide as a real model's, so that sums are as deep."""
    plan = plan_of(_config(settings(NORMED_LAYERS, width)))
    grads: dict[str, Tensor] = {
        p.name: torch.zeros(p.shard_numel, device=device)
        for u in plan.units
        for p in u.unit.parameters
    }
    return _host_seconds(lambda: squares(grads, plan, device), device)


def _tokens(device: torch.device) -> Tensor:
    return torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
