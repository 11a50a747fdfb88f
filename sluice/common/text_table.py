"""Formats rows of texts for a person on a terminal: `aligned`."""

from __future__ import annotations


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Formats rows of texts as aligned columns, a line for each row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
