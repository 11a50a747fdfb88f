"""Cells: Arrow streams as single values, so that Spark moves bytes and not rows. All functions run in the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

CELL_BYTES = 4 << 20
"""The size of a cell. Java has five copies of a cell in memory while it writes the cell."""
READ = pa.ipc.IpcReadOptions(use_threads=False)


def write_cell(
    batches: Sequence[pa.RecordBatch],
    schema: pa.Schema,
    options: pa.ipc.IpcWriteOptions | None = None,
) -> pa.Array:
    """Returns an array of one value, the cell with these batches. Does not copy the cell."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
    cell = sink.getvalue()
    ends = pa.py_buffer(np.array([0, cell.size], np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, ends, cell])


def read_stream(cell: pa.BinaryScalar) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a cell."""
    # `as_py` copies the bytes. A cell may begin at any byte of its batch, and numbers must be aligned.
    yield from pa.ipc.open_stream(cell.as_py(), options=READ)


def slices(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields the rows in parts of about `CELL_BYTES` or less."""
    step = max(1, -(-rows.num_rows // max(1, -(-rows.nbytes // CELL_BYTES))))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)
