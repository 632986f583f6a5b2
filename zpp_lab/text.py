"""Tables for a terminal, for whoever prints one without the packages of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table for a terminal; the first `left` columns are words, the others numbers."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["─" * width for width in widths], *rows]
    return "\n".join("  ".join(_align(line, widths, left)).rstrip() for line in lines)


def shares(quantized: Mapping[Any, float]) -> tuple[str, str]:
    """The quantized part of each wire's bytes (0 to 1, by wire) for people: of the weights' wires
    and of the gradients', such as "98.8%", or "99.1/0%" where a kind's two differ."""
    weights, grads = (
        [value for wire, value in quantized.items() if wire.startswith(kind)]
        for kind in ("weights", "grads")
    )
    return percents(weights), percents(grads)


def percents(values: Sequence[float]) -> str:
    """Those that differ, rounded down: 100% is all there is."""
    told = [f"{int(1000 * value + 1e-9) / 10:g}" for value in values]
    return "/".join(dict.fromkeys(told)) + "%" if told else "–"


def _align(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    return [
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
