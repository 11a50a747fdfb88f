"""The answer to a unit: `encode_rows` on the worker, `decode_rows` in the loader.

Rows are sent as they lie in memory, never compressed, so the length of an answer says what it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sluice.ingest.flow.number_types import arrow_array
from sluice.ingest.process.protocol import is_count
from sluice.ingest.remote.calls import decode, encode
from sluice.ingest.remote.unit import RemoteJob, Unit, WrongAnswer

_ENDS = "\0ends"
"""What the name of a column of bags is followed by, for the array of the places where bags end."""
_HEAD_BYTES = 2**20
_BAG_GROWTH = 8
"""How many times as long as was estimated an answer with bags may be."""


def most_bytes(job: RemoteJob, unit: Unit, expected: int) -> int:
    """Returns how long an answer may be. `expected` is the memory that was reserved for the unit, which says how long
    bags may be."""
    sizes = (kind.bit_width // 8 for name, kind in job.kinds.items() if name not in job.bags)
    fixed: int = sum(sizes) + 8 * len(job.bags)
    return _HEAD_BYTES + (unit.rows + 1) * fixed + _BAG_GROWTH * expected * bool(job.bags)


def encode_rows(batch: pa.RecordBatch, job: RemoteJob, unit: Unit, throttled: int) -> pa.Buffer:
    """Encodes the rows of a unit. `throttled` is the number of requests that the worker's store refused."""
    arrays = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in job.bags:
            ends = column.offsets.to_numpy()
            arrays[name + _ENDS] = ends - ends[0]
        arrays[name] = (column.flatten() if name in job.bags else column).to_numpy()
    return encode({"request": unit.sum(job), "throttled": throttled}, arrays)


def decode_rows(body: pa.Buffer, job: RemoteJob, unit: Unit) -> tuple[pa.RecordBatch, int]:
    """Returns the rows of a unit, and how many requests the worker's store refused. Raises `WrongAnswer` if it is not
    the answer to this request."""
    head, arrays = decode(body)
    if head.get("request") != unit.sum(job):
        raise WrongAnswer("values that belong to another table, version or request")
    throttled: Any = head.get("throttled")
    if not is_count(throttled):
        raise WrongAnswer("no number of refused requests")
    if arrays.keys() != {*job.kinds, *(name + _ENDS for name in job.bags)}:
        raise WrongAnswer(f"columns {[*arrays]} where {[*job.kinds]} were asked for")
    columns = []
    for name, kind in job.kinds.items():
        rows = None if name in job.bags else unit.rows
        column = _column(arrays[name], name, kind, rows)
        if name in job.bags:
            ends = _column(arrays[name + _ENDS], name, pa.int64(), unit.rows + 1)
            column = pa.LargeListArray.from_arrays(ends, column)
        columns.append(column)
    try:
        batch = pa.record_batch(columns, schema=job.schema)
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise WrongAnswer(f"no valid Arrow: {error}") from None
    return batch, throttled


def _column(
    array: np.ndarray[Any, Any], name: str, kind: pa.DataType, rows: int | None
) -> pa.Array:
    if array.dtype != kind.to_pandas_dtype() or array.ndim != 1 or rows not in (None, array.size):
        raise WrongAnswer(
            f"column {name!r} of type {array.dtype} and shape {array.shape}, where {kind} and "
            f"{'any number' if rows is None else rows} of values were asked for"
        )
    return arrow_array(array)
