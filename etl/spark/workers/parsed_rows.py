"""`ParsedRows`: parses the input once, and stores the rows for all passes.

Each task stores its rows in a file on the executor's disk (`spark.local.dir`). If a later pass does not find the file,
for instance after an executor was lost, it parses that part of the input again.

Most functions here run in the workers."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import StorageLevel, TaskContext
from pyspark.sql import DataFrame

from sluice.etl.apply.counts import (
    COUNT_ROWS,
    CountsOfRows,
    KeyedRows,
    counts_of_parsed,
    is_full,
    join_batches,
    selected,
    split_keys,
    with_key_column,
)
from sluice.etl.apply.features import Features
from sluice.etl.apply.input_checks import Before, Part
from sluice.etl.apply.parse import Batches, InputParser, Parsed
from sluice.etl.apply.rejected import (
    NOWHERE,
    REJECTS,
    PartParser,
    count_rows,
    describe,
    encoded_headers,
)
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.ops.base import plain
from sluice.etl.ops.chain import FeatureError
from sluice.etl.read.input_files import TaskInput, pieces_of_task
from sluice.etl.spark.workers.cells import READ, count_cells, read_numbers, slices, write_cell
from sluice.etl.spark.workers.row_file import RowFile
from sluice.etl.spec.row_split import TIES, ties
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState

ROWS = 1 << 15
"""The number of rows to which operators are applied together."""
DOT = "\x1f"
"""Stands for a dot in the names of columns that Spark sends to workers."""
_COLUMNS = "file string, part int, counts binary, rejects binary"
_CELLS = pa.schema(
    [
        ("file", pa.string()),
        ("part", pa.int32()),
        ("counts", pa.binary()),
        ("rejects", pa.binary()),
    ]
)
COUNTED_PARTS = "file string, start bigint, rows bigint"


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """What a worker needs to parse the rows of its task, or to find them again.

    A row of the result has one of three: the `file` with the rows of the task `part`; a cell with the `counts` of a
    `part` of all values; or a cell of `rejects`."""

    spec: Spec
    level: int | None
    """The operators of this level learn from the rows that are counted."""
    count_parts: int
    before: Before | None
    """The number of rows before each part of the input, and of all rows, if the spec has `input.place`."""
    parts: Callable[[], Sequence[TaskInput]]
    """Returns the parts of each task, by its number."""

    def parse(self, frame: DataFrame) -> DataFrame:
        """Returns the parsed rows and their counts. `frame` has the numbers of tasks."""
        return frame.mapInArrow(partial(_parse, self), _COLUMNS).persist(StorageLevel.DISK_ONLY)

    def read(self, batches: Batches, *, last: bool = False) -> Batches:
        """Yields rows that were stored. After the `last` pass, files are removed."""
        for batch in batches:
            for task, path in zip(
                batch["part"].to_pylist(), batch["file"].to_pylist(), strict=True
            ):
                file = path
                try:
                    stored = pa.memory_map(file)
                except FileNotFoundError:
                    # It is on the disk of a lost executor, or an attempt of the last pass has removed it.
                    parser = self.parser()
                    with RowFile(task) as again:
                        for part, rows in self.rows_of_task(task):
                            again.write(self.stored(parser.parse(part, rows)[0]))
                    file = again.path
                    stored = pa.memory_map(file)
                if last or file != path:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file)
                yield from pa.ipc.open_stream(stored, options=READ)

    def rows_of_task(self, task: int) -> Iterator[tuple[Part, pa.RecordBatch]]:
        """Yields the rows before parsing, each batch with its part."""
        for piece in pieces_of_task(self.parts()[task]):
            for batch in piece.batches():
                yield piece.part, batch

    def parser(self) -> PartParser:
        return PartParser(self.spec, self.before)

    def stored(self, parsed: Parsed) -> pa.RecordBatch:
        """Returns the rows to store: for joins and histories all that parse, otherwise those that filters and the
        sample keep, with their keys."""
        if self.spec.rows.relational:
            names = self.spec.input.with_place
            return pa.record_batch({name: plain(parsed.columns[name]) for name in names})
        return with_key_column(*selected(self.spec, parsed))

    def parts_of_task(self) -> TaskInput:
        """Returns the parts of the task that runs. Empty if rows have met others."""
        task = TaskContext.get()
        if task is None or self.spec.rows.relational:
            return ()
        return self.parts()[task.partitionId()]


def count_rows_of_parts(parsed: ParsedRows, batches: Batches) -> Batches:
    """Counts the rows of each part before parsing, without headers. Runs in a worker."""
    headers = encoded_headers(parsed.spec.input)
    for task in read_numbers(batches):
        for (file, start), batch in parsed.rows_of_task(task):
            yield pa.record_batch(
                [[file], [start], [count_rows(batch, headers)]], ["file", "start", "rows"]
            )


def reject_related(spec: Spec, batches: Batches) -> Batches:
    """Yields the rows that are rejected after joins and histories, as cells. Runs in a worker."""
    parser = InputParser(spec)
    for batch in batches:
        rows = with_dots(batch)
        rejected = describe(NOWHERE, None, rows, parser.parse(rows).rejected)
        if rejected.num_rows:
            cell = write_cell([rejected], REJECTS)
            yield pa.record_batch([cell], ["rejects"])


def name_files(work: Callable[..., Batches]) -> Callable[..., Batches]:
    """Decorates a function of a worker whose first argument is `ParsedRows`. If an operator fails, the error names the
    files of the task. After joins and histories, a task has no files."""

    @functools.wraps(work)
    def with_files(parsed: ParsedRows, *arguments: Any, **named: Any) -> Batches:
        try:
            yield from work(parsed, *arguments, **named)
        except FeatureError as failure:
            parts = parsed.parts_of_task()
            files = list(dict.fromkeys(part.file.name_in_rejects for part in parts))
            place = f"{' or '.join(files[:2])}{' …' if len(files) > 2 else ''}: " if files else ""
            raise JobFailure(f"{place}{failure}; nothing was published") from failure

    return with_files


def rows_with_ties(parsed: ParsedRows, batches: Batches) -> Batches:
    """Yields the stored rows for joins and histories, with the columns that order rows of the same time."""
    for rows in parsed.read(batches):
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        hashes = [pa.array(tie.view(np.int64)) for tie in ties(columns, parsed.spec)]
        yield from slices(pa.record_batch([*rows.columns, *hashes], [*columns, *TIES]))


def with_dots(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows after joins and histories with the names of the spec."""
    return rows.rename_columns([name.replace(DOT, ".") for name in rows.schema.names])


def selected_rows(parsed: ParsedRows, batches: Batches) -> Iterator[KeyedRows]:
    """Yields the rows that filters and the sample keep, for the last pass: files with rows are removed. `batches` have
    stored rows, or columns after joins and histories."""
    spec = parsed.spec
    if spec.rows.relational:
        parser = InputParser(spec)
        yield from (selected(spec, parser.parse(with_dots(batch))) for batch in batches)
    else:
        yield from map(split_keys, join_batches(parsed.read(batches, last=True), ROWS))


@name_files
def _parse(parsed_rows: ParsedRows, batches: Batches) -> Batches:
    """Stores the parsed rows of a task, and yields where they are, and cells with their counts."""
    for task in read_numbers(batches):
        with RowFile(task) as file:
            yield from _parse_rows(parsed_rows, file, task)
        if not file.is_empty:
            yield _result(file=pa.array([file.path]), part=pa.array([task], pa.int32()))


def _parse_rows(parsed_rows: ParsedRows, file: RowFile, task: int) -> Batches:
    spec, parser = parsed_rows.spec, parsed_rows.parser()
    counts = CountsOfRows(spec, parsed_rows.level, Features(spec, FittedState(), ahead=False))
    to_count, counted = list[pa.RecordBatch](), list[pa.RecordBatch]()

    def cells() -> Batches:
        if to_count:
            counted.extend(counts.count_selected(*split_keys(pa.concat_batches(to_count))))
        for cell in count_cells(counted, parsed_rows.count_parts):
            yield _result(part=cell["part"], counts=cell["counts"])
        to_count.clear()
        counted.clear()

    for part, batch in parsed_rows.rows_of_task(task):
        parsed, rejects = parser.parse(part, batch)
        rows = parsed_rows.stored(parsed)
        if rejects.num_rows:
            yield _result(rejects=write_cell([rejects], REJECTS))
        file.write(rows)
        if spec.rows.relational:
            counted.append(counts_of_parsed(spec, parsed).batch())
            continue
        counted += counts.count_parsed(parsed)
        to_count.append(rows)
        if is_full(to_count, COUNT_ROWS):
            yield from cells()
    yield from cells()
    yield _result(rejects=write_cell(list(parser.lines()), REJECTS))


def _result(**cells: Any) -> pa.RecordBatch:
    """Returns a row of the first pass: see `ParsedRows`."""
    nothing = {field.name: pa.nulls(1, field.type) for field in _CELLS}
    return pa.record_batch(nothing | cells, schema=_CELLS)
