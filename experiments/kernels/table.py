"""README.md's table of speeds from h200.json: python experiments/kernels/table.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measure import OPS

HERE = Path(__file__).parent
BITS = (2, 4, 6, 8)


def share(rows: list[dict[str, Any]], copy: float) -> str:
    """Of the copy of as many bytes, GB/s."""
    values = [row["gb_s"] / copy * 100 for row in rows]
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{least} %" if least == most else f"{least}–{most} %"


def main() -> None:
    report = json.loads((HERE / "h200.json").read_text())
    rows = [row for row in report["grid"] if row["block"] > 32]
    copies = {row["mib"]: row["gb_s"] for row in report["copy"]}
    print("| bf16 values | kind | operator | 2 bit | 4 bit | 6 bit | 8 bit |")
    print("|---|---|---|---|---|---|---|")
    for mib in sorted({row["mib"] for row in rows}, reverse=True):
        for kind in ("nearest", "stochastic", "Hadamard 64"):
            for op in OPS:
                mine = [
                    row
                    for row in rows
                    if (row["mib"], row["op"]) == (mib, op)
                    and kind == ("Hadamard 64" if row["hadamard"] else row["rounding"])
                ]
                if mine:
                    by_bits = ([r for r in mine if r["bits"] == bits] for bits in BITS)
                    cells = [share(some, copies[mib]) for some in by_bits]
                    print(f"| {mib} MiB | {kind} | {op} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
