"""What remote workers read: a `RemoteJob` (the table and the order of its rows) and a `Unit` (one read).

Job and unit together determine the rows, so any worker can make them, any number of times. A unit is one read and not
one window. A window may combine reads that were done here with reads of remote workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from sluice.etl.schema import digest
from sluice.ingest.flow.decoded import ReadTask
from sluice.ingest.flow.number_types import arrow_array
from sluice.ingest.remote.messages import (
    Arrays,
    Head,
    RemoteError,
    Request,
    WrongAnswer,
    encode,
)

_ENDS = "\0ends"
"""What the name of a column of bags is followed by, for the array of the places where bags end."""
_HEAD_BYTES = 2**20
_BAG_GROWTH = 8
"""How many times as long as was estimated an answer with bags may be."""


@dataclass(frozen=True, kw_only=True)
class RemoteJob:
    """Which rows a loader reads, in which order, and in which columns. A worker refuses a job that differs from what it
    finds itself.

    Three fields are digests: `files` (names, sizes and known content), `plan` (with its row groups) and `made` (the
    operators that make columns). Only plain Parquet has `roles`, because a feature table holds its own."""

    version: str
    files: str
    split: str
    roles: Mapping[str, list[str]]
    hash: Mapping[str, int]
    batch_size: int
    seed: int
    order: Mapping[str, Any]
    plan: str
    columns: Mapping[str, str]
    """Each column, and the type in a batch of its numbers or of the ids in its bags."""
    bags: Mapping[str, float]
    fill: Mapping[str, float]
    history: Mapping[str, Any] | None
    made: str

    @cached_property
    def values(self) -> dict[str, Any]:
        """The job as a worker gets it."""
        return dict(json.loads(json.dumps(asdict(self))))

    @cached_property
    def digest(self) -> str:
        return digest(self.values)

    @cached_property
    def kinds(self) -> Mapping[str, pa.DataType]:
        """The type of each column's numbers, or of the ids in its bags."""
        return {name: pa.type_for_alias(kind) for name, kind in self.columns.items()}

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of every batch of the job."""
        return pa.schema(
            [
                (name, pa.large_list(kind) if name in self.bags else kind)
                for name, kind in self.kinds.items()
            ]
        )

    @classmethod
    def of(cls, given: Any) -> Self:
        """Parses a job that another program sent. RemoteError if it is none."""
        try:
            return cls(**given)
        except TypeError as error:
            raise RemoteError(f"a job lacks fields or has unknown ones: {error}") from None


class Part(NamedTuple):
    """The rows `start` to `stop` of a row group, which all lie in one window. `full`: they are all rows of the
    window."""

    stream: int
    window: int
    start: int
    stop: int
    full: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """One read of an epoch."""

    epoch: int
    file: int
    group: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @property
    def description(self) -> str:
        return f"file {self.file}, row group {self.group}"

    @classmethod
    def of(cls, task: ReadTask) -> Self:
        windows, read = task.schedule.windows, task.read
        return cls(
            task.schedule.epoch,
            read.file,
            read.group,
            tuple(
                Part(
                    windows[p.window].stream,
                    windows[p.window].number,
                    p.start,
                    p.stop,
                    p.stop - p.start == windows[p.window].rows,
                )
                for p in read.parts
            ),
        )

    def request(self, job: RemoteJob, expected: int = 0) -> Request:
        """Asks for the rows. Each request holds the job, so that a new worker, or one that has forgotten the job, can
        open it. `expected` is the memory that was reserved for the rows, which says how long bags may be."""
        sizes = (kind.bit_width // 8 for name, kind in job.kinds.items() if name not in job.bags)
        fixed: int = sum(sizes) + 8 * len(job.bags)
        address = [self.epoch, self.file, self.group, self.parts]
        return Request(
            "read",
            "read",
            self.description,
            rows=self.rows,
            body=encode({"job": job.values, "unit": address}, {}),
            most_bytes=_HEAD_BYTES
            + (self.rows + 1) * fixed
            + _BAG_GROWTH * expected * bool(job.bags),
            result=partial(self._rows_of, job),
        )

    @classmethod
    def requested(cls, head: Head) -> tuple[RemoteJob, Self]:
        """Returns the job and the unit of a request. RemoteError if it is not a valid one."""
        try:
            *address, parts = head["unit"]
            epoch, file, group = map(_number, address)
            unit = cls(
                epoch,
                file,
                group,
                tuple(Part._make((*map(_number, rows), bool(full))) for *rows, full in parts),
            )
        except (KeyError, TypeError, ValueError):
            raise RemoteError("a request that names no rows") from None
        return RemoteJob.of(head.get("job")), unit

    def _rows_of(self, job: RemoteJob, _head: Head, arrays: Arrays) -> pa.RecordBatch:
        """Returns the rows in an answer. Raises `WrongAnswer` if they are none of the job."""
        if arrays.keys() != {*job.kinds, *(name + _ENDS for name in job.bags)}:
            raise WrongAnswer(f"columns {[*arrays]} where {[*job.kinds]} were asked for")
        columns = []
        for name, kind in job.kinds.items():
            rows = None if name in job.bags else self.rows
            column = _column(arrays[name], name, kind, rows)
            if name in job.bags:
                ends = _column(arrays[name + _ENDS], name, pa.int64(), self.rows + 1)
                column = pa.LargeListArray.from_arrays(ends, column)
            columns.append(column)
        try:
            batch = pa.record_batch(columns, schema=job.schema)
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise WrongAnswer(f"no valid Arrow: {error}") from None
        return batch


def arrays_of(batch: pa.RecordBatch, job: RemoteJob) -> Arrays:
    """Returns the rows of a unit as the arrays of an answer."""
    arrays = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in job.bags:
            ends = column.offsets.to_numpy()
            arrays[name + _ENDS] = ends - ends[0]
        arrays[name] = (column.flatten() if name in job.bags else column).to_numpy()
    return arrays


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a row's number")
    return value


def _column(
    array: np.ndarray[Any, Any], name: str, kind: pa.DataType, rows: int | None
) -> pa.Array:
    if array.dtype != kind.to_pandas_dtype() or array.ndim != 1 or rows not in (None, array.size):
        raise WrongAnswer(
            f"column {name!r} of type {array.dtype} and shape {array.shape}, where {kind} and "
            f"{'any number' if rows is None else rows} of values were asked for"
        )
    return arrow_array(array)
