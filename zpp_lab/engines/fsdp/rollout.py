"""Weights for generation under FSDP2: other gathers, and another layout while they last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from zpp_lab.collectives.ledger import LedgerError
from zpp_lab.collectives.plan import Bytes
from zpp_lab.collectives.traffic import NOTHING, Traffic
from zpp_lab.collectives.transport import Transport, all_gather
from zpp_lab.config.wires import ROLLOUT
from zpp_lab.engines.fsdp.comm import held
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.units import ROOT


@contextmanager
def rolling(wrapped: Wrapped, whole: bool, wire: bool) -> Iterator[None]:
    """Gather weights as the wire of rollouts brings them: all at once, to stay until the end
    (`whole`), or unit by unit in each forward. Every rank enters it; forwards are without
    gradients."""
    clock, again = wrapped.clock, wrapped.plan.recipe.config.again
    wrapped.reshard()
    clock.grad, clock.rolling, clock.observer = False, wire, None
    modules = list(wrapped.by_name.values())
    try:
        for module in modules if whole else ():
            module.set_reshard_after_forward(False, recurse=False)
        with held(modules) if whole else nullcontext():
            yield
    finally:
        for name, module in wrapped.by_name.items():
            module.set_reshard_after_forward(again and name != ROOT, recurse=False)
        wrapped.reshard()
        clock.rolling = False


def rollout_traffic(wrapped: Wrapped) -> Traffic:
    """Return what this rank has sent for rollouts since the ledgers' last `start_step`."""
    return sum((u.ledger.step.get(ROLLOUT, NOTHING) for u in wrapped.installed), NOTHING)


def rolled_bytes(wrapped: Wrapped, passes: int | None, before: Traffic) -> Bytes:
    """Return what all ranks sent for a rollout (`Plan.rollout_bytes`). before: `rollout_traffic`
    when it began. LedgerError where something else was sent than planned."""
    planned = wrapped.plan.rollout_bytes(passes)
    if not wrapped.installed:
        return planned  # an untouched FSDP2's transfers are out of sight
    total = (rollout_traffic(wrapped) + before * -1) * wrapped.plan.recipe.cluster.world
    if total != planned.get(ROLLOUT, NOTHING):
        raise LedgerError(
            f"{ROLLOUT}: sent {total}, planned {planned.get(ROLLOUT, NOTHING)} bytes in this "
            "rollout (inside nodes, between nodes): the engine did not follow the recipe; please "
            "report this"
        )
    return planned


def all_agree(transport: Transport, device: torch.device) -> Callable[[bool], bool]:
    """Return a function that tells all ranks whether all of them are done."""

    def agree(done: bool) -> bool:
        own = torch.tensor([done], dtype=torch.uint8, device=device)
        every = own.new_empty(transport.cluster.world)
        with transport.watched("whether all ranks have generated (world)", device):
            all_gather(every, own, group=transport.group)
        with transport.watched("whether all ranks have generated", torch.device("cpu")):
            return bool(every.all())

    return agree
