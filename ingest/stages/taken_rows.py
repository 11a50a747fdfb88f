"""The rows of a series of batches for functions over rows: `TakenRows`, `take_rows`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.flow.decoded import Placed
from sluice.ingest.flow.number_types import arrow_array
from sluice.ingest.row_order import Read
from sluice.ingest.stages.batch import BatchSeries, row_numbers


@dataclass(frozen=True)
class TakenRows:
    """Some rows of a series. They come read by read."""

    table: pa.Table
    """The columns that functions get."""
    at: npt.NDArray[np.int64]
    """The place of each row in the series, counted from its first batch on."""
    reads: Sequence[Read]
    whose: npt.NDArray[np.int64]
    """The index in `reads` of each row's read."""
    numbers: npt.NDArray[np.int64]
    """The number of each row in its read."""

    @property
    def rows(self) -> int:
        return len(self.at)

    def origin(self, row: int) -> tuple[Read, int]:
        """Returns the read of a row, and the row's number in the row group."""
        read: Read = self.reads[self.whose[row]]
        return read.origin(int(self.numbers[row]))

    def piece(self, start: int, stop: int) -> TakenRows:
        """Returns the rows `start` to `stop` alone."""
        at, whose, numbers = (a[start:stop] for a in (self.at, self.whose, self.numbers))
        return TakenRows(self.table.slice(start, stop - start), at, self.reads, whose, numbers)


def take_rows(series: BatchSeries, most: int) -> Iterator[TakenRows]:
    """Yields the rows of a series, at most so many at once. Those of the first batches come first.

    Padding and rows that could not be read are left out. Types may differ between files, so rows of different types
    are not together."""
    placed = [read for read, _ in series.reads]
    if not placed:
        return
    first = np.array([read.task.first for read in placed], np.uint32)
    # Numbers begin at 0 again after 2**32, and their distances do not.
    begins = (first - first[0]).astype(np.int64)
    numbers = (row_numbers(series.placed).reshape(-1) - first[0]).astype(np.int64)
    whose = np.searchsorted(begins, numbers, "right") - 1
    numbers -= begins[whose]
    is_row = numbers < np.array([read.task.read.rows for read in placed])[whose]
    schemas = [None if read.held is None else read.held.schema for read in placed]
    for schema in dict.fromkeys(filter(None, schemas)):
        has_schema = np.array([other is not None and other.equals(schema) for other in schemas])
        places = np.flatnonzero(is_row & has_schema[whose])
        for low in range(0, len(places), most):
            at = places[low : low + most]
            at = at[np.lexsort((numbers[at], whose[at]))]
            yield _take(placed, at, whose[at], numbers[at])


def _take(
    placed: Sequence[Placed],
    at: npt.NDArray[np.int64],
    whose: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
) -> TakenRows:
    tables = []
    starts = np.flatnonzero(np.diff(whose, prepend=-1)).tolist()
    for start, stop in itertools.pairwise([*starts, len(whose)]):
        held = placed[whose[start]].held
        assert held is not None
        tables.append(held.take(arrow_array(numbers[start:stop])))
    table = pa.concat_tables(tables).combine_chunks()
    return TakenRows(table, at, [read.task.read for read in placed], whose, numbers)
