"""How often the rows of a table are looked up: runs of rows with their share of all lookups, as the ETL counted them.

Frequent values have low ids. If a table is cut into blocks of rows, nearly all lookups fall on the first block. A
placement takes that into account, and `spread_out` in `options.py` prevents it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Runs = tuple[tuple[int, int, float], ...]
"""(first row, row after the last, share of the lookups)"""

_LOW = 18  # null, the buckets of unknown values, and the first of the vocabulary


def runs(column: Mapping[str, Any], rows: int) -> Runs:
    """Returns the runs of a column's profile (`sluice.etl.table.profile`): one for each octave of the vocabulary."""
    total = sum(column["bins"].values())
    if not total:
        return ()
    spans = []
    for name, count in column["bins"].items():
        kind, _, number = name.partition(" ")
        low, high = (2 ** int(number), 2 ** (int(number) + 1)) if kind == "octave" else (0, _LOW)
        # Ids beyond the table were hashed, or belong to another version.
        low, high = min(low, rows - 1), min(high, rows)
        spans.append((low, max(high, low + 1), count / total))
    return tuple(sorted(spans))


def share(use: Runs, rows: int, low: int, high: int) -> float:
    """Returns the share of the lookups on rows from `low` up to, but not including, `high`."""
    if not use:
        return (high - low) / rows
    return sum(
        part * max(0, min(high, after) - max(low, first)) / (after - first)
        for first, after, part in use
    )
