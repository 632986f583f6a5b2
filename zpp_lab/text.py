"""Tables for a terminal, for whoever prints one without the packages of the report."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table for a terminal; the first `left` columns are words, the others numbers."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["─" * width for width in widths], *rows]
    return "\n".join("  ".join(_align(line, widths, left)).rstrip() for line in lines)


def _align(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    return [
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
