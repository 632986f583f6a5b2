"""Compares what a unit really sent in a step with what its plan says."""

from __future__ import annotations

from collections.abc import Set

from zpp_lab.collectives.ledger import LedgerError
from zpp_lab.collectives.plan import Bytes
from zpp_lab.engines.fsdp_comm import Installed


def check_unit(unit: Installed, sent: Bytes, planned: Bytes, present: Set[str]) -> None:
    """LedgerError when bytes differ on a wire, or when a parameter's gradient (`present`: names)
    did not come from our reductions."""
    name = unit.plan.unit.name
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
