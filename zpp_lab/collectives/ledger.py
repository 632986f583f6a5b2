"""The ledger counts what really travelled and fails when that is not what was planned."""

from __future__ import annotations

from zpp_lab.collectives.traffic import Traffic
from zpp_lab.config.schema import WIRES, Wire


class LedgerError(RuntimeError):
    """Bytes sent differ from bytes planned: some collective did not do what its recipe says."""


class Ledger:
    """Bytes of one step by wire and link, and totals over all steps."""

    def __init__(self) -> None:
        self.step: dict[Wire, Traffic] = {}
        self.start_step()

    def start_step(self) -> None:
        self.step = {wire: Traffic(0, 0) for wire in WIRES}

    def add(self, wire: Wire, traffic: Traffic) -> None:
        before = self.step[wire]
        self.step[wire] = Traffic(before[0] + traffic[0], before[1] + traffic[1])

    def check(self, planned: dict[Wire, Traffic]) -> None:
        """Compare the step with the plan; LedgerError names the first wire that differs."""
        for wire in WIRES:
            if self.step[wire] != planned[wire]:
                raise LedgerError(
                    f"{wire}: sent {self.step[wire]}, planned {planned[wire]} bytes (inside nodes, "
                    "between nodes): the engine did not follow the recipe; please report this"
                )
