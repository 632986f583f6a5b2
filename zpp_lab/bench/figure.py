"""The kernel benchmark's figure: rates as a share of a copy, one panel a kind of codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zpp_lab.bench.work import OPS

KINDS = {
    "nearest": "nearest rounding",
    "stochastic": "stochastic rounding (where noise is drawn)",
    "Hadamard 64": "Hadamard 64, nearest rounding",
}


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Block 64, symmetric, fp32 scales, the largest size: what the figure shows."""
    largest = max(row["mib"] for row in report["grid"])
    rows = []
    for row in report["grid"]:
        plain = row["symmetric"] and row["block"] == 64 and row["scales"] == "fp32"
        if not plain or row["mib"] != largest or (row["hadamard"] and row["rounding"] != "nearest"):
            continue
        kind = "Hadamard 64" if row["hadamard"] else row["rounding"]
        rows.append({**row, "kind": kind, "bits": f"{row['bits']} bit"})
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the figure as SVG. ImportError where altair is not installed."""
    import altair

    largest = max(row["mib"] for row in report["grid"])
    title = altair.Title(
        f"Codec kernels on {report['machine']['gpu']}, {largest} MiB of bf16",
        subtitle=f"share of a copy ({report['copy_gb_s']:.0f} GB/s); block 64, symmetric",
    )
    rows = rows_of(report)
    ops = [op for op in OPS if any(row["op"] == op for row in rows)]
    operators = altair.X(
        "op:N",
        title=None,
        sort=ops,
        scale=altair.Scale(domain=ops),  # the same places in every panel
        axis=altair.Axis(labelAngle=0),
    )
    panels = []
    for kind, text in KINDS.items():
        values = altair.Data(values=[row for row in rows if row["kind"] == kind])
        bars = (
            altair.Chart(values, title=altair.Title(text, anchor="start", fontSize=11))
            .mark_bar()
            .encode(
                x=operators,
                xOffset=altair.XOffset("bits:N"),
                y=altair.Y(
                    "of_copy:Q",
                    title="of the copy's rate",
                    axis=altair.Axis(format="%"),
                    scale=altair.Scale(domain=[0, 1]),
                ),
                color=altair.Color("bits:N", title=None),
                tooltip=["gb_s:Q", "us:Q"],
            )
        )
        panels.append(bars.properties(width=520, height=110))
    altair.vconcat(*panels, title=title).save(str(path))
