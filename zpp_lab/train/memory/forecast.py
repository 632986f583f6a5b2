"""What a run's config says before anything runs: bytes, memory, and seconds on a named machine.

Everything is a formula over the plan; the model is on the meta device and no token is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zpp_lab.config.schema import Config
from zpp_lab.config.wires import Wire


@dataclass(frozen=True)
class Needed:
    """Memory in bytes: of the process that plays all ranks (`each` False), or of each rank's GPU.
    at_least: weights, optimizer and gradients alone; activations come on top."""

    nbytes: int
    each: bool = False
    at_least: bool = False


@dataclass(frozen=True)
class Foreseen:
    """Forecast of one run. None: no formula applies."""

    step_bytes: float | None  # all ranks together; of several phases the mean
    memory: Needed | None
    quantized: Mapping[Wire, float] | None = None  # of each wire's bytes


def foresee(config: Config) -> Foreseen:
    """Forecast a run's bytes, memory and quantized shares."""
    if config.engine.name == "deepspeed":  # which follows no plan of ours
        return Foreseen(None, None)
    from zpp_lab.collectives.plan import bytes_per_step, quantized_share
    from zpp_lab.engines.build import plans_of

    plans, rl = plans_of(config), config.rl
    each: float | None = bytes_per_step(plans, rl.steps_per_rollout)
    if config.task == "rl" and rl.gather == "token":  # as many gathers as tokens are sampled
        each = None
    return Foreseen(each, memory_need(config), quantized_share(plans))


def memory_need(config: Config) -> Needed | None:
    """Return what a run must have at its peak, in whichever phase, or at least."""
    each = [_memory_need(phase.config) for phase in _placed(config).phases]
    return max((need for need in each if need), key=lambda need: need.nbytes, default=None)


def _placed(config: Config) -> Config:
    """Return the settings with the placement that engine.place=auto may come to mean."""
    if config.engine.place != "auto":
        return config
    from zpp_lab.train.memory.outlook import expected

    return expected(config).config


def _memory_need(config: Config) -> Needed | None:
    from zpp_lab.engines.build import plan_of, vocabulary
    from zpp_lab.train.memory.estimate import estimate
    from zpp_lab.train.memory.host import virtual_bytes

    if config.engine.name == "virtual":
        return Needed(virtual_bytes(config), at_least=True)
    if config.engine.name == "deepspeed":
        return None
    return Needed(estimate(plan_of(config), config, vocabulary(config)).peak, each=True)


def host_bytes(config: Config) -> int | None:
    """Return the host memory of each process of a run, without Python, libraries and text; None
    with engine=deepspeed. For engine=virtual twice what is held all the time: tensors and
    activations, or on a GPU the checkpoint on its way."""
    each = [_host_bytes(phase.config) for phase in _placed(config).phases]
    return max((nbytes for nbytes in each if nbytes is not None), default=None)


def _host_bytes(config: Config) -> int | None:
    from zpp_lab.engines.build import plan_of, vocabulary
    from zpp_lab.train.memory.estimate import estimate
    from zpp_lab.train.memory.host import virtual_bytes

    if config.engine.name == "virtual":
        return 2 * virtual_bytes(config)
    if config.engine.name == "deepspeed":
        return None
    if config.engine.device != "cpu":
        return estimate(plan_of(config), config, vocabulary(config)).host
    config = replace(config, engine=replace(config.engine, transport="groups"))
    found = estimate(plan_of(config), config, vocabulary(config))
    return found.host + found.tensors
