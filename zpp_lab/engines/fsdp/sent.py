"""The bytes that a step has really sent, compared with what the plan says of it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from zpp_lab.collectives.ledger import LedgerError
from zpp_lab.collectives.plan import Bytes, Plan, StepUse, add_bytes, leg_bytes, no_bytes
from zpp_lab.collectives.reduce import uneven
from zpp_lab.config.wires import UPDATE
from zpp_lab.engines.fsdp.comm import Installed
from zpp_lab.engines.fsdp.prefetch import InVain
from zpp_lab.engines.fsdp.wrap import Wrapped


class Sent:
    """Counts each step's bytes on one rank. Every rank sends the same, so each compares its own.
    Where FSDP2 is untouched its transfers are out of sight, and the figures are the plan's."""

    def __init__(self, wrapped: Wrapped, vain: InVain) -> None:
        self.wrapped, self.vain = wrapped, vain
        self.settled: tuple[Any, Bytes] | None = None  # what was last sent as planned, and bytes

    def count(self, plan: Plan, use: StepUse, present: frozenset[str], as_planned: bool) -> Bytes:
        """Return what all ranks sent; LedgerError names a unit that did not follow the plan.
        `present`: names of parameters with a gradient."""
        units = self.wrapped.installed
        vain = dict(self.vain.forward), dict(self.vain.backward)
        counts = [dict(u.ledger.step) for u in units]  # copies: `kept.send` adds to the originals
        facts = use, present, vain, counts, [u.present.taken for u in units]
        if self.settled is not None and as_planned and self.settled[0] == facts:
            return dict(self.settled[1])  # the same again: what was checked holds
        total = self._compared(use, present, as_planned) if units else plan.step_bytes(use)
        self.settled = (facts, dict(total)) if as_planned else None
        return total

    def _compared(self, use: StepUse, present: frozenset[str], as_planned: bool) -> Bytes:
        total = no_bytes()
        for unit in self.wrapped.installed:
            sent = {wire: t * unit.gather.cluster.world for wire, t in unit.ledger.step.items()}
            legs = unit.plan.legs(use) + self.vain.legs(unit.plan)
            planned = leg_bytes(leg for leg in legs if leg.wire != UPDATE)  # which is yet to come
            if as_planned:
                check_unit(unit, sent, planned, present)
            add_bytes(total, sent)
        return total


def check_unit(unit: Installed, sent: Bytes, planned: Bytes, present: Set[str]) -> None:
    """LedgerError when bytes differ on a wire, or when a parameter's gradient (`present`: names)
    did not come from our reductions."""
    name = unit.plan.unit.name
    if unit.reduce.sums is not None:
        raise ValueError(uneven(set(unit.reduce.summed)))
    for wire, traffic in planned.items():
        if sent[wire] != traffic:
            raise LedgerError(
                f"unit {name}, {wire}: sent {sent[wire]}, planned {traffic} bytes in this step "
                "(inside nodes, between nodes): the engine did not follow the recipe; please "
                "report this"
            )
    reduced = {n for names in unit.present.taken for n in names}
    astray = reduced ^ (unit.plan.unit.trainable & present)
    if astray:
        raise LedgerError(
            f"unit {name}: the gradient of {min(astray)} and the unit's reductions do not agree "
            "on whether it was sent; please report this"
        )
