"""Where the rows of a batch come from: `Origins`. Asked for only when something went wrong, so nothing carries it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ingest.plan import RowsPlan, Window


class Origin(NamedTuple):
    """A row of the table; `file` is its number in the plan, `row` its number within the row group."""

    file: int
    group: int
    row: int


class Origins:
    """Of the batches of one rank, worked out from the plan."""

    def __init__(self, plan: RowsPlan, rank: int, ranks: int):
        self._plan, self._streams = plan, plan.streams_of(rank, ranks)
        self._windows = functools.lru_cache(maxsize=2)(self._of_epoch)
        self.batch = functools.lru_cache(maxsize=8)(self._of_batch)
        """Of (epoch, step): one origin for each row; None for a row that only fills the batch."""

    def _of_batch(self, epoch: int, step: int) -> list[Origin | None]:
        each = self._plan.stream_rows
        low, high = step * each, (step + 1) * each
        found: list[Origin | None] = []
        for windows in self._windows(epoch):
            rows = [row for window in windows if window.first < high and window.first + window.rows > low
                    for row in self._rows(epoch, window, low, high)]
            found += rows + [None] * (each - len(rows))
        return found

    def _of_epoch(self, epoch: int) -> list[list[Window]]:
        return [list(self._plan.windows(epoch, (stream,))) for stream in self._streams]

    def _rows(self, epoch: int, window: Window, low: int, high: int) -> list[Origin]:
        """The rows of a window that are from `low` to before `high` in its stream."""
        order = self._plan.order(epoch, window)
        first, last = max(low - window.first, 0), min(high - window.first, window.rows)
        wanted = np.arange(first, last) if order is None else order[first:last]
        starts = np.cumsum([0, *(s.rows for s in window.slices)])
        pieces = np.searchsorted(starts, wanted, side="right") - 1
        return [Origin(window.slices[p].file, window.slices[p].group, window.slices[p].start + int(n - starts[p]))
                for n, p in zip(wanted, pieces, strict=True)]
