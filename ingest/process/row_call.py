"""Calls a user's function on some rows of a row group: `call_on_rows`. A worker process gets them as Arrow's stream.

Both sides use it. It is imported when the first rows come, because it needs Arrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_GIVES = b"gives"
"""The key under which the schema of rows holds the schema of the columns that the function gives."""

Rows = Any
"""A record batch, or the bytes of an encoded one."""


def asking_for(gives: pa.Schema) -> dict[bytes, bytes]:
    """Returns the metadata of rows for which a function must give these columns."""
    return {_GIVES: gives.serialize().to_pybytes()}


def encode(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return np.frombuffer(sink.getvalue(), np.uint8)


def decode(rows: Rows) -> pa.RecordBatch:
    """Returns the rows as a record batch that uses the memory of the encoded rows."""
    if isinstance(rows, pa.RecordBatch):
        return rows
    return pa.ipc.open_stream(pa.py_buffer(rows)).read_next_batch()


def call_on_rows(call: Callable[[dict[str, Any]], Any], given: Rows) -> Rows:
    """Calls a function on rows and returns the columns that it gives, encoded if the rows were."""
    rows = decode(given)
    gives = pa.ipc.read_schema(pa.py_buffer(rows.schema.metadata[_GIVES]))
    result = call({name: _values(rows.column(name)) for name in rows.schema.names})
    if not isinstance(result, Mapping):
        raise TypeError(
            f"it returned {type(result).__name__}, not a dict of the columns that it gives"
        )
    if unknown := [name for name in result if name not in gives.names]:
        raise ValueError(
            f"it returned a column {unknown[0]!r} that it does not give: add it to gives, or leave it out"
        )
    columns = pa.record_batch(
        [_column(field, result, rows.num_rows) for field in gives], schema=gives
    )
    return columns if given is rows else encode(columns)


def _values(column: pa.Array) -> Any:
    """Returns numbers, times and booleans as a numpy array, and other values as Arrow's array. Missing whole numbers
    make floats of a column, with NaN."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.to_numpy(zero_copy_only=column.null_count == 0)
    return column


def _column(field: pa.Field, result: Mapping[str, Any], rows: int) -> pa.Array:
    if field.name not in result:
        raise ValueError(f"it returned no column {field.name!r}, which it gives")
    value = result[field.name]
    try:
        if not isinstance(value, (pa.Array, pa.ChunkedArray)):
            value = pa.array(value)
        column = value.cast(field.type)
    except pa.ArrowException as error:
        raise ValueError(f"column {field.name!r} does not become {field.type}: {error}") from None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if len(column) != rows:
        raise ValueError(
            f"column {field.name!r} came back with {len(column)} values for {rows} rows: give one for each row"
        )
    return column
