"""`foreknowledge`: what a loader knows of its pipeline before the first row, for the learned policy."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING

from sluice.agent.policies.opening.contract import ColumnGroup, Foreknowledge

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader


def foreknowledge(loader: BatchLoader) -> Foreknowledge:
    """Returns the columns by their type in a batch, where the files lie, and how large row groups are. Nothing is known
    of a user's function before it runs."""
    dense = len(loader.dense_names)
    sparse = len(loader.sparse_names)
    number = struct.calcsize("f")
    columns = {"float32": ColumnGroup(count=dense, bytes_per_row=dense * number)} if dense else {}
    if sparse:
        columns["int32"] = ColumnGroup(
            count=sparse, bytes_per_row=max(0, loader.row_bytes - dense * number)
        )
    groups = [rows for rows in itertools.chain(*loader.plan.groups) if rows]
    rows = sum(groups) // len(groups) if groups else None
    return Foreknowledge(
        columns=columns or None,
        store="remote" if loader.store else "local",
        row_group_rows=rows,
        row_group_bytes=None if rows is None else max(1, rows * loader.row_bytes),
        operators={},
    )
