"""Refuse a run without GPUs where this machine's memory cannot hold it.

Its processes share one memory. Where it is too small, the kernel kills one of them after minutes in
which nothing else on the machine can work, and none can say why.
"""

from __future__ import annotations

from dataclasses import replace

from zpp_lab.collectives.plan import Plan
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import INTRA
from zpp_lab.engines.build import plan_of, vocabulary
from zpp_lab.engines.optim import state_bytes
from zpp_lab.runs.provenance import memory_bytes
from zpp_lab.train.memory.activations import FP32
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.estimate import estimate

KILLED = (
    "The kernel killed it because the machine's memory was full: use a smaller model or fewer "
    "ranks (`zpp-lab plan` lists what each rank holds)"
)


def check_host_memory(config: Config) -> None:
    """ValueError where the tensors, by closed formulas, exceed the machine's memory. Processes and
    libraries come on top, so that passing is no promise. There are formulas for the built-in
    decoder under FSDP2 and in the virtual engine; other runs pass."""
    if config.engine.name == "deepspeed" or config.model.name != "llama":
        return
    for phase in config.phases if config.recipe.phases else ():
        check_host_memory(phase.config)
    if config.engine.name == "virtual":
        _check_virtual(config)
        return
    on_cpu = replace(config, engine=replace(config.engine, transport="groups"))
    each = estimate(plan_of(on_cpu), on_cpu, vocabulary(on_cpu)).tensors
    world, there = config.cluster.world, memory_bytes()
    if world * each > there:
        raise ValueError(
            f"{world} ranks on the CPU need {each / GIB:.1f} GiB each and this machine has "
            f"{there / GIB:.1f} GiB for all: use a smaller model or fewer ranks, or a machine "
            f"with GPUs (`zpp-lab doctor` lists this machine's){_of_memories(plan_of(on_cpu), 1)}"
        )


def _of_memories(plan: Plan, ranks: int) -> str:
    """Say how much of it residuals take, and how to need less; "" without residuals."""
    if not plan.memories:
        return ""
    first = any(wire == plan.recipe.hops[0] for wire, _ in plan.memories)
    less = "recipe.grads.memory.store=8bit"
    if first and plan.recipe.cluster.nodes > 1 < plan.recipe.cluster.gpus_per_node:
        less = f"only between nodes (recipe.hops=2 recipe.{INTRA}.memory.kind=none), or " + less
    held = 2 * ranks * plan.memory_bytes / GIB
    return f". Of these, {held:.1f} GiB are error-feedback residuals, old and new: keep them {less}"


def _check_virtual(config: Config) -> None:
    need, there = virtual_bytes(config), memory_bytes()
    if need > there:
        more = _of_memories(plan_of(config), config.cluster.world)
        raise ValueError(
            f"model, gradients and optimizer need {need / GIB:.1f} GiB and this machine has "
            f"{there / GIB:.1f} GiB: use a smaller model, or a GPU that holds them{more}"
        )


def virtual_bytes(config: Config) -> int:
    """Return what the virtual engine holds all the time, in bytes, activations left out: weights
    in param_dtype, of the trained ones fp32 masters, both moments, gradient sums in fp32 and the
    copy that is encoded; the residuals of all ranks, before and after the step."""
    plan = plan_of(config)
    held, kind = plan.recipe.weights_dtype.itemsize, config.train.optimizer_state
    total = 2 * config.cluster.readers * plan.memory_bytes
    for unit in (each.unit for each in plan.units):
        for p in unit.parameters:
            total += held * p.numel
            if p.name in unit.trainable:
                total += (2 * FP32 + (held if held < FP32 else 0)) * p.numel
                total += state_bytes(p.shape, kind)
    return config.cluster.tp * total
