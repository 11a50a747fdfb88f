"""Calls a user's function on rows of a row group: `call_on_rows`. A worker process gets them as Arrow's stream.

Both sides use it. It is imported when the first rows come, because it needs Arrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.process import protocol

_GIVES = b"gives"
"""The key under which the schema of rows holds the schema of the columns that the function gives."""
_FRAME = b"frame"
"""The key under which the schema of rows for a TransformSpec's function holds its columns and their shapes."""

Rows = Any
"""A record batch, or the bytes of an encoded one."""


def asking_for(gives: pa.Schema, frame: str = "") -> dict[bytes, bytes]:
    """Returns the metadata of rows for which a function must give these columns. `frame` is that of a
    `FrameFunction`."""
    return {_GIVES: gives.serialize().to_pybytes(), **({_FRAME: frame.encode()} if frame else {})}


def encode(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return np.frombuffer(sink.getvalue(), np.uint8)


def decode(rows: Rows) -> pa.RecordBatch:
    """Returns the rows as a record batch that uses the memory of the encoded rows, which another process wrote."""
    if isinstance(rows, pa.RecordBatch):
        return rows
    try:
        batch = pa.ipc.open_stream(pa.py_buffer(rows)).read_next_batch()
        batch.validate(full=True)
    except (pa.ArrowException, OSError, StopIteration, TypeError) as error:
        raise ValueError(f"rows that are not valid Arrow: {error}") from None
    return batch


def decode_result(given: Mapping[str, Rows], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the columns that a function has given for `rows`."""
    made = decode(given.get(protocol.ROWS))
    gives = pa.ipc.read_schema(pa.py_buffer(rows.schema.metadata[_GIVES]))
    if made.num_rows != rows.num_rows or not made.schema.equals(gives):
        raise ValueError(
            f"its worker sent {made.num_rows} rows of {made.schema.names} for {rows.num_rows} of {gives.names}"
        )
    return made


def call_on_rows(function: Callable[[Any], Any], given: Rows) -> Rows:
    """Calls a function on rows and returns the columns that it gives, encoded if the rows were."""
    rows = decode(given)
    asked = rows.schema.metadata
    gives = pa.ipc.read_schema(pa.py_buffer(asked[_GIVES]))
    if _FRAME in asked:
        frame = rows.replace_schema_metadata(None).to_pandas()
        made = _frame_columns(call_on_frame(function, frame), json.loads(asked[_FRAME]))
        if len(made) != rows.num_rows:
            raise ValueError(
                f"the function of the TransformSpec returned {len(made)} rows for {rows.num_rows}. It must return "
                "one row for each row, or the order of rows is lost; use a predicate to leave rows out"
            )
        table = pa.Table.from_pandas(made[gives.names], preserve_index=False).cast(gives)
        columns = pa.record_batch(
            [column.combine_chunks() for column in table.columns], schema=gives
        )
    else:
        columns = _call_on_arrays(function, rows, gives)
    return columns if given is rows else encode(columns)


def _call_on_arrays(
    function: Callable[[Any], Any], rows: pa.RecordBatch, gives: pa.Schema
) -> pa.RecordBatch:
    result = protocol.call_function(
        function, {name: _values(rows.column(name)) for name in rows.schema.names}
    )
    if not isinstance(result, Mapping):
        raise TypeError(
            f"it returned {type(result).__name__}, not a dict of the columns that it gives"
        )
    if unknown := [name for name in result if name not in gives.names]:
        raise ValueError(
            f"it returned a column {unknown[0]!r} that it does not give: add it to gives, or leave it out"
        )
    return pa.record_batch([_column(field, result, rows.num_rows) for field in gives], schema=gives)


def call_on_frame(function: Callable[[Any], Any], frame: Any) -> Any:
    """Calls a TransformSpec's function on a DataFrame and returns the DataFrame that it makes."""
    try:
        made = function(frame)
    except Exception as error:
        raise ValueError(
            f"the function of the TransformSpec failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(made, "columns"):
        raise ValueError(
            f"the function of the TransformSpec returned {type(made).__name__}, not a DataFrame"
        )
    for name, column in made.items():
        protocol.check_arrow(column, f"the field {name!r} of the TransformSpec")
    return made


def keep_frame(frame: Any) -> Any:
    """Returns the frame: what a TransformSpec without a function does."""
    return frame


def _frame_columns(made: Any, asked: Mapping[str, Any]) -> Any:
    """Returns the frame without the fields that the TransformSpec removes. Arrays of several dimensions become flat, as
    Arrow needs them."""
    made = made.drop(columns=[name for name in asked["removed"] if name in made.columns])
    if set(made.columns) != set(asked["shapes"]):
        raise ValueError(
            f"the function of the TransformSpec returned the result columns {sorted(made.columns)}, and its schema has "
            f"{sorted(asked['shapes'])}"
        )
    for name, shape in asked["shapes"].items():
        if len(shape) < 2:
            continue
        for value in made[name]:
            if getattr(value, "shape", None) != tuple(shape):
                raise ValueError(
                    f"the function of the TransformSpec gives {name!r} values that are not arrays of the shape "
                    f"{tuple(shape)}"
                )
        made[name] = made[name].map(np.ravel)
    return made


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
            protocol.check_arrow(value, f"column {field.name!r}")
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
