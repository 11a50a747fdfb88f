"""Collects what a loader knows of its pipeline before the first row, for the learned policy: `foreknowledge`."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Protocol

from sluice.agent.policies.opening.contract import ColumnGroup, Foreknowledge
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import FETCH
from sluice.ingest.row_order import RowsPlan


class LoaderFacts(Tunable, Protocol):
    """The properties of a loader that are known before the first row."""

    @property
    def dense_names(self) -> Sequence[str]: ...

    @property
    def sparse_names(self) -> Sequence[str]: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def plan(self) -> RowsPlan: ...


def foreknowledge(loader: LoaderFacts) -> Foreknowledge:
    """Returns the columns by their type in a batch, the kind of store, and the size of row groups.

    Whether a function is Python code shows when it runs (`Snapshot.lock_held_s`)."""
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
        store="remote" if FETCH in loader.limits.workers else "local",
        row_group_rows=rows,
        row_group_bytes=None if rows is None else max(1, rows * loader.row_bytes),
    )
