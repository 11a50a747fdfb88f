"""Collects what a loader knows of its pipeline before the first row, for the learned policy: `foreknowledge`."""

from __future__ import annotations

import itertools
from typing import Protocol

from sluice.agent.choice.observation import Foreknowledge
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import FETCH
from sluice.ingest.row_order import RowsPlan


class LoaderFacts(Tunable, Protocol):
    """The properties of a loader that are known before the first row."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def plan(self) -> RowsPlan: ...


def foreknowledge(loader: LoaderFacts) -> Foreknowledge:
    """Returns the size of rows and row groups, and the kind of store.

    Whether a function is Python code shows when it runs (`Snapshot.lock_held_s`)."""
    groups = [rows for rows in itertools.chain(*loader.plan.groups) if rows]
    return Foreknowledge(
        row_bytes=loader.row_bytes,
        row_group_rows=sum(groups) // len(groups) if groups else None,
        store="remote" if FETCH in loader.limits.workers else "local",
    )
