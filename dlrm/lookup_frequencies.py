"""How often rows of a table are looked up, as the ETL counted it: runs of rows with their share of all lookups.

Ids follow falling counts, so a table cut into blocks of rows has nearly all its lookups in the first block. A placement
takes that into account, and `spread_out` of dlrm/sharding avoids it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Runs = tuple[tuple[int, int, float], ...]
"""(first row, row after the last, share of the lookups)"""

_LOW = 18  # null, the buckets of unknown values, and the first of the vocabulary


def runs(column: Mapping[str, Any], rows: int) -> Runs:
    """The runs from a column's profile (`sluice.etl.table.profile`): each octave of the vocabulary is a run."""
    total = sum(column["bins"].values())
    if not total:
        return ()
    found = []
    for name, count in column["bins"].items():
        kind, _, number = name.partition(" ")
        low, high = (2 ** int(number), 2 ** (int(number) + 1)) if kind == "octave" else (0, _LOW)
        low, high = (
            min(low, rows - 1),
            min(high, rows),
        )  # what lies beyond was hashed or is of another version
        found.append((low, max(high, low + 1), count / total))
    return tuple(sorted(found))


def top(column: Mapping[str, Any], rows: int) -> tuple[tuple[int, float], ...]:
    """The most frequent ids and their shares."""
    total = max(1, int(column["rows"]))
    return tuple((int(i), n / total) for i, n in column["top"].items() if int(i) < rows)


def spread_runs(frequent: Sequence[tuple[int, float]], rows: int, stride: int) -> Runs:
    """The runs of a table whose row i lies at i · stride mod rows: even, except for the most frequent ids."""
    if not frequent:
        return ()
    singles = [
        (at, at + 1, share) for at, share in ((i * stride % rows, share) for i, share in frequent)
    ]
    return tuple(sorted([(0, rows, max(0.0, 1 - sum(share for _, share in frequent))), *singles]))


def share(use: Runs, rows: int, low: int, high: int) -> float:
    """The share of the lookups that fall on rows from `low` up to, but without, `high`."""
    if not use:
        return (high - low) / rows
    return sum(
        part * max(0, min(high, after) - max(low, first)) / (after - first)
        for first, after, part in use
    )
