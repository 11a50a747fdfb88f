"""`SortedRows`: sorts the rows of one file, within a budget of memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.apply.row_store import RowStore

_PART_BYTES = 4 << 20
"""The size of the pieces in which a sorted run is read from the disk."""


class SortedRows:
    """Collects rows with the columns of `RowPlacement.finish`, and yields them in that order.

    Rows stay in memory up to a budget. Beyond it they wait on the disk in sorted runs, which are merged at the end.
    """

    def __init__(self, budget: int) -> None:
        """`budget` is the limit in bytes. A sort needs about three times as much memory."""
        self._budget = budget
        self._bytes = 0
        self._batches: list[pa.RecordBatch] = []
        self._disk = RowStore(0)
        self._runs = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > self._budget:
            self._write_run()

    def pieces(self, rows: int) -> Iterator[pa.Table]:
        """Yields all rows in tables of `rows` rows. Only the last table may be smaller. Call it once."""
        if not self._runs:
            table = self._take_rows()
            order = sort_order(table)
            for start in range(0, len(order), rows):
                yield table.take(pa.array(order[start : start + rows]))
            return
        if self._batches:
            self._write_run()
        waiting: list[pa.Table] = []
        for table in self._merge():
            waiting.append(table)
            if sum(map(len, waiting)) >= rows:
                whole = pa.concat_tables(waiting)
                ends = range(rows, len(whole) + 1, rows)
                for end in ends:
                    yield whole.slice(end - rows, rows)
                waiting = [whole.slice(ends[-1])]
        if any(map(len, waiting)):
            yield pa.concat_tables(waiting)

    def close(self) -> None:
        self._disk.close()

    def _take_rows(self) -> pa.Table:
        table = pa.Table.from_batches(self._batches).combine_chunks()
        self._batches, self._bytes = [], 0
        return table

    def _write_run(self) -> None:
        """Sorts the rows in memory, and writes them to the disk."""
        table = self._take_rows()
        step = max(1, _PART_BYTES * len(table) // max(1, table.nbytes))
        parts = table.take(pa.array(sort_order(table))).combine_chunks().to_batches(step)
        self._disk.put((self._runs, part) for part in parts)
        self._runs += 1

    def _merge(self) -> Iterator[pa.Table]:
        """Yields the rows of all runs in order. Has one part of each run in memory, or little more."""
        runs = {number: self._read(number) for number in range(self._runs)}
        table: pa.Table | None = None
        while runs or table:
            loaded = set(table["_run"].to_numpy().tolist()) if table else set()
            parts = [table] if table else []
            for number in runs.keys() - loaded:
                part = next(runs[number], None)
                if part is None:
                    del runs[number]
                else:
                    parts.append(part)
            if not parts:
                return
            table = pa.concat_tables(parts).combine_chunks()
            table = table.take(pa.array(sort_order(table)))
            of_run = table["_run"].to_numpy()
            # What follows the last loaded row of a run may follow rows that are not loaded, too.
            known = min(
                (int(np.flatnonzero(of_run == number)[-1]) + 1 for number in runs),
                default=len(table),
            )
            yield table.slice(0, known).drop_columns("_run")
            table = table.slice(known)

    def _read(self, number: int) -> Iterator[pa.Table]:
        """Yields the parts of a run, with its number."""
        for rows in self._disk.get(number):
            yield pa.Table.from_batches([rows]).append_column(
                "_run", pa.array(np.full(rows.num_rows, number, np.int32))
            )


def sort_order(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Returns the numbers of the rows in the order of their file: see `RowPlacement.finish`."""
    names = ("_row", "_key", "_then", "_first")
    by = [rows[name].to_numpy() for name in names if name in rows.column_names]
    return np.argsort(by[0]) if len(by) == 1 else np.lexsort(by)
