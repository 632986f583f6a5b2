"""Whether the memory of this machine can hold a run without GPUs, before it is started.

Its processes share one memory. Where it is too small, the kernel kills one of them after minutes
in which nothing else on the machine can work, and none can say why.
"""

from __future__ import annotations

from dataclasses import replace

from zpp_lab.config import Config
from zpp_lab.cost.model import plan_of, vocabulary
from zpp_lab.machine import memory_bytes
from zpp_lab.memory import estimate
from zpp_lab.moments import GIB

FP32 = 4
_MOMENTS = {"fp32": 8, "bf16": 4, "8bit": 2}  # bytes a parameter, scales left out
KILLED = (
    "The kernel killed it because the machine's memory was full: take a smaller model or fewer "
    "ranks (`zpp-lab plan` says what each rank holds)"
)


def check_host_memory(config: Config) -> None:
    """ValueError where the tensors, by closed formulas, exceed the machine's memory.

    Processes and libraries come on top, so that passing is no promise. There are formulas for the
    built-in decoder under FSDP2 and in the virtual engine; other runs pass.
    """
    if config.engine.name == "deepspeed" or config.model.name != "llama":
        return
    if config.engine.name == "virtual":
        _check_virtual(config)
        return
    on_cpu = replace(config, engine=replace(config.engine, transport="groups"))
    each = estimate(plan_of(on_cpu), on_cpu, vocabulary(on_cpu)).tensors
    world, there = config.cluster.world, memory_bytes()
    if world * each > there:
        raise ValueError(
            f"{world} ranks on the CPU need {each / GIB:.1f} GiB each and this machine has "
            f"{there / GIB:.1f} GiB for all: take a smaller model or fewer ranks, or start this "
            "where there are GPUs (`zpp-lab doctor` says what is seen here)"
        )


def _check_virtual(config: Config) -> None:
    """Whatever the number of ranks: each weight as it is gathered, its master, the mean gradient
    and the optimizer's state; of a frozen base the gathered weight alone. Activations come on top.
    """
    plan = plan_of(config)
    moments, gathered = _MOMENTS[config.train.optimizer_state], plan.recipe.weights_dtype.itemsize
    need = 0
    for unit in (each.unit for each in plan.units):
        for p in unit.parameters:
            own = 0 if p.name in unit.stored else FP32
            trained = FP32 + moments if p.name in unit.trainable else 0
            need += p.numel * (gathered + own + trained)
    if need > memory_bytes():
        raise ValueError(
            f"the model, its gradients and the optimizer need {need / GIB:.1f} GiB and this "
            f"machine has {memory_bytes() / GIB:.1f} GiB: take a smaller model, or start this "
            "where there is a GPU that holds them"
        )
