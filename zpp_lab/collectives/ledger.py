"""The ledger counts what really travelled and fails when that is not what was planned."""

from __future__ import annotations

from zpp_lab.collectives.traffic import NOTHING, Traffic
from zpp_lab.config.wires import Wire, wires_among


class LedgerError(RuntimeError):
    """Bytes sent differ from bytes planned: some collective did not do what its recipe says."""


class Ledger:
    """Bytes of one step by wire and link, and totals over all steps."""

    def __init__(self) -> None:
        self.step: dict[Wire, Traffic] = {}
        self.start_step()

    def start_step(self) -> None:
        self.step = dict.fromkeys(wires_among(), NOTHING)

    def add(self, wire: Wire, traffic: Traffic) -> None:
        before = self.step.get(wire, NOTHING)
        self.step[wire] = Traffic(before[0] + traffic[0], before[1] + traffic[1])

    def check(self, planned: dict[Wire, Traffic]) -> None:
        """Compare the step with the plan; LedgerError names the first wire that differs."""
        for wire in {**planned, **self.step}:
            sent, wanted = (found.get(wire, NOTHING) for found in (self.step, planned))
            if sent != wanted:
                raise LedgerError(
                    f"{wire}: sent {sent}, planned {wanted} bytes (inside nodes, "
                    "between nodes): the engine did not follow the recipe; please report this"
                )
