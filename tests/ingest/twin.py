"""The slow twin: the rows plan's promise in plain words, read with pyarrow in one thread, gathered with numpy."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq

from tests.product import RowsPlan, compose_order


def rows_of_stream(plan: RowsPlan, epoch: int, stream: int) -> list[tuple[int, int, int]]:
    """(file, row group, row) of every row of a stream, in order."""
    rows = []
    for window in plan.windows(epoch, (stream,)):
        inside = [(s.file, s.group, n) for s in window.slices for n in range(s.start, s.stop)]
        halves = plan.halves(epoch, window)
        order = range(len(inside)) if halves is None else compose_order(*halves, len(inside))
        rows += [inside[n] for n in order]
    return rows


def batches(
    plan: RowsPlan, epoch: int, rank: int = 0, ranks: int = 1
) -> list[list[tuple[int, int, int] | None]]:
    """The rows of each batch of a rank, None for a row that only fills it."""
    each = plan.batch_size // plan.streams
    streams = [rows_of_stream(plan, epoch, s) for s in range(plan.streams)]
    own = plan.batch_size // ranks
    return [
        [
            row
            for rows in streams
            for row in (rows[k * each : (k + 1) * each] + [None] * each)[:each]
        ][rank * own : (rank + 1) * own]
        for k in range(plan.steps)
    ]


class Table:
    """A whole split in memory, by file and row group."""

    def __init__(self, files):
        self.groups = {}
        for number, file in enumerate(files):
            whole = pq.ParquetFile(file.path)
            for group in range(whole.num_row_groups):
                table = whole.read_row_group(group, use_threads=False)
                self.groups[number, group] = {n: table[n].to_numpy() for n in table.column_names}
            whole.close()

    def column(self, name: str, rows) -> np.ndarray:
        return np.array(
            [0 if row is None else self.groups[row[0], row[1]][name][row[2]] for row in rows]
        )


def expect(loader, table: Table, batch, rows) -> None:
    """Fails unless a batch holds exactly these rows of the table, in this order."""
    weight = [row is not None for row in rows]
    np.testing.assert_array_equal(batch.weight.numpy(), np.array(weight, np.float32))
    np.testing.assert_array_equal(
        batch.label.numpy(), table.column("label", rows).astype(np.float32)
    )
    for n, name in enumerate(loader.dense_names):
        np.testing.assert_array_equal(
            batch.dense[:, n].numpy(), table.column(name, rows).astype(np.float32), name
        )
    ids = batch.values.view(len(loader.sparse_names), -1)
    for n, name in enumerate(loader.sparse_names):
        np.testing.assert_array_equal(ids[n].numpy(), table.column(name, rows), name)
    assert batch.rows == sum(weight)
    assert len(batch.lengths) == len(batch.values)
    assert int(batch.lengths.min()) == int(batch.lengths.max()) == 1


def eventually(holds: Callable[[], bool]) -> None:
    """Fails unless something that other threads bring about comes to hold."""
    end = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        threading.Event().wait(0.01)


def halve(columns: dict) -> dict:
    """A user's function."""
    return {"I1": columns["I1"] * 0.5}
