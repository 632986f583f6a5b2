"""Whether peers' rows are copied or read in place, and by how much of the GPU.

copy    the copy engines bring all rows into this GPU's memory, kernels then read them there
kernel  the kernel that decodes or sums them reads them where they lie
auto    whichever was measured to cost the model less, by size; copies where nothing was measured
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from zpp_lab.collectives.transport import Kind
from zpp_lab.crossover import Crossover
from zpp_lab.ops import MAX_ROWS

Pull = Literal["auto", "copy", "kernel"]

# Multiprocessors of a kernel that pulls; 0 is all. A gather's rows are decoded on the model's own
# stream, which waits for them, so what the kernel left alone would idle. A reduction runs beside
# the backward pass: 32 keep two megabytes under way (4 bits), several times what a link of
# 400 GB/s and 2 µs holds, and leave three quarters of an H200 to the model.
MULTIPROCESSORS: dict[Kind, int] = {"gather": 0, "exchange": 32}


@dataclass(frozen=True)
class Pulls:
    """Who pulls. measured: by number of ranks, for `auto`. multiprocessors: of such a kernel; 0
    takes `MULTIPROCESSORS`."""

    choice: Pull = "copy"
    multiprocessors: int = 0
    measured: Mapping[int, Crossover] = field(default_factory=dict)

    def by_kernel(self, kind: Kind, count: int, rows: int, nbytes: int) -> bool:
        """Whether a kernel reads `rows` rows, of `nbytes` together, that `count` ranks have."""
        if self.choice == "copy" or rows > MAX_ROWS:
            return False
        if self.choice == "kernel":
            return True
        known = self.measured.get(count)
        least = getattr(known, kind) if known is not None else None
        return least is not None and nbytes * (count - 1) / count >= least

    def describe(self) -> str:
        """For the log; empty where copies do it all."""
        found = self.choice == "kernel" or (self.choice == "auto" and self.measured)
        how = "" if self.choice == "kernel" else " from the measured size on"
        return f", read in place by kernels{how}, {MAX_ROWS} rows at most" if found else ""

    def share(self, kind: Kind) -> int:
        return self.multiprocessors or MULTIPROCESSORS[kind]
