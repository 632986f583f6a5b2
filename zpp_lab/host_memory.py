"""Whether ranks on the CPU of this machine can hold their run, before they are started.

Ranks without GPUs share one memory. Where it is too small, the kernel kills one of them after
minutes in which nothing else on the machine can work, and no rank can say why.
"""

from __future__ import annotations

from dataclasses import replace

from zpp_lab.config import Config
from zpp_lab.cost.model import plan_of, vocabulary
from zpp_lab.machine import memory_bytes
from zpp_lab.memory import estimate
from zpp_lab.moments import GIB

KILLED = (
    "The kernel killed it because the machine's memory was full: take a smaller model or fewer "
    "ranks (`zpp-lab plan` says what each rank holds)"
)


def check_host_memory(config: Config) -> None:
    """ValueError where the ranks' tensors, by the plan's formula, exceed the machine's memory.

    Processes and libraries come on top, so that passing is no promise. The formula is for the
    built-in decoder under FSDP2; other runs pass.
    """
    if config.engine.name != "fsdp" or config.model.name != "llama":
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
