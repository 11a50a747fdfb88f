"""`ParsedRows`: parses the input once, and stores the rows for all passes.

If workers read the input themselves, each task stores its rows in a file on the executor's disk. If a later pass does
not find the file, for instance after an executor was lost, it parses that part of the input again. Otherwise rows are
in cells: a cell has some rows as an Arrow stream, so that Spark moves bytes and not values, and stores them on the
executors' disks (`spark.local.dir`).

Most functions here run in the workers, on batches of cells."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.apply.counts import (
    COUNT_ROWS,
    CountsOfRows,
    counts_of_parsed,
    is_full,
    join_batches,
    selected,
    split_keys,
    with_key_column,
)
from sluice.etl.apply.failure import FeatureError
from sluice.etl.apply.features import Features
from sluice.etl.apply.parse import Batches, InputParser, Parsed
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.ops.base import plain
from sluice.etl.spark.workers.cells import READ, one_value, read_stream, slices, write_stream
from sluice.etl.spark.workers.count_cells import count_cells
from sluice.etl.spark.workers.row_file import RowFile
from sluice.etl.spark.workers.task_rows import TaskRows
from sluice.etl.spec.row_split import TIES, Keys, ties
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Before: TypeAlias = tuple[Mapping[tuple[str, int], int], int]
"""See `sluice.etl.apply.input_checks.rows_before`."""
ROWS = 1 << 15
"""The number of rows to which operators are applied together."""
DOT = "\x1f"
"""Stands for a dot in the names of columns that Spark sends to workers."""
_CELLS = "rows binary, file string, part int, counts binary"


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """What a worker needs to parse the rows of its task, or to find them again.

    A row of the result has one of three: a cell `rows`; the `file` with the rows of the task `part`; or a cell with the
    `counts` of a `part` of all values."""

    spec: Spec
    level: int | None
    """The operators of this level learn from the rows that are counted."""
    count_parts: int
    before: Before | None
    """The number of rows before each part of the input, and of all rows, if the spec has `input.place`."""
    raw: TaskRows | None
    """None: Spark reads the input."""

    def parse(self, frame: DataFrame) -> DataFrame:
        """Returns the parsed rows and their counts. `frame` has the numbers of tasks, or the rows before parsing."""
        from pyspark import StorageLevel

        return frame.mapInArrow(partial(_parse, self), _CELLS).persist(StorageLevel.DISK_ONLY)

    def read(self, batches: Batches, *, last: bool = False) -> Batches:
        """Yields rows that were stored. After the `last` pass, files are removed."""
        for batch in batches:
            for rows in batch["rows"].drop_null():
                yield from read_stream(rows)
            for number, path in zip(*batch.select(["part", "file"]).columns, strict=True):
                if not path.is_valid:
                    continue
                file = path.as_py()
                try:
                    stored = pa.memory_map(file)
                except FileNotFoundError:
                    # It is on the disk of a lost executor, or an attempt of the last pass has removed it.
                    assert self.raw is not None
                    with RowFile(number.as_py()) as again:
                        for _, rows in self.parsed(self.raw.of(number.as_py())):
                            again.write(rows)
                    file = again.path
                    stored = pa.memory_map(file)
                if last or file != path.as_py():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file)
                yield from pa.ipc.open_stream(stored, options=READ)

    def parsed(self, lines: Batches) -> Iterator[tuple[Parsed, pa.RecordBatch]]:
        """Parses lines. With each result it yields the rows to store: for joins and histories all that parse,
        otherwise those that filters and the sample keep, with their keys."""
        parser = InputParser(self.spec)
        seen = Counter[tuple[str, int]]()
        for batch in lines:
            places = compute_places(batch, self.before, seen) if self.before else None
            parsed = parser.parse(batch, places)
            if self.spec.rows.relational:
                names = self.spec.input.with_place
                stored = {name: plain(parsed.columns[name]) for name in names}
                yield parsed, pa.record_batch(stored)
                continue
            yield parsed, with_key_column(*selected(self.spec, parsed))


def name_files(work: Callable[..., Batches]) -> Callable[..., Batches]:
    """Decorates a function of a worker whose first argument is `ParsedRows`. If an operator fails, the error names the
    files of the task. After joins and histories, a task has no files."""

    @functools.wraps(work)
    def with_files(parsed: ParsedRows, *arguments: Any, **named: Any) -> Batches:
        try:
            yield from work(parsed, *arguments, **named)
        except FeatureError as failure:
            from pyspark import TaskContext

            task, files = TaskContext.get(), list[str]()
            if task is not None and parsed.raw is not None and not parsed.spec.rows.relational:
                parts = parsed.raw.parts()[task.partitionId()]
                files = list(dict.fromkeys(part.file.name_in_rejects for part in parts))
            place = f"{' or '.join(files[:2])}{' …' if len(files) > 2 else ''}: " if files else ""
            raise JobFailure(f"{place}{failure}; nothing was published") from failure

    return with_files


def rows_with_ties(parsed: ParsedRows, batches: Batches) -> Batches:
    """Yields the stored rows for joins and histories, with the columns that order rows of the same time."""
    for rows in parsed.read(batches):
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        hashes = [pa.array(tie.view(np.int64)) for tie in ties(columns, parsed.spec)]
        yield pa.record_batch([*rows.columns, *hashes], [*rows.schema.names, *TIES])


def with_dots(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows after joins and histories with the names of the spec."""
    return rows.rename_columns([name.replace(DOT, ".") for name in rows.schema.names])


def selected_rows(
    parsed: ParsedRows, batches: Batches, *, last: bool = False
) -> Iterator[tuple[dict[str, pa.Array], Keys]]:
    """Yields the rows that filters and the sample keep. `batches` have stored rows, or columns after joins and
    histories. After the `last` pass, files with rows are removed."""
    spec = parsed.spec
    if spec.rows.relational:
        parser = InputParser(spec)
        yield from (selected(spec, parser.parse(with_dots(batch))) for batch in batches)
    else:
        yield from map(split_keys, join_batches(parsed.read(batches, last=last), ROWS))


@name_files
def _parse(parsed_rows: ParsedRows, batches: Batches) -> Batches:
    """Stores the parsed rows of a task, and yields where they are, and cells with their counts."""
    raw = parsed_rows.raw
    if raw is None:
        yield from _parse_lines(parsed_rows, None, batches)
        return
    for task in (number for batch in batches for number in batch["id"].to_pylist()):
        if parsed_rows.spec.rows.relational:
            yield from _parse_lines(parsed_rows, None, raw.of(task))
            continue
        with RowFile(task) as file:
            yield from _parse_lines(parsed_rows, file, raw.of(task))
        if not file.is_empty:
            yield _result(file=file.path, part=task)


def _parse_lines(parsed_rows: ParsedRows, file: RowFile | None, lines: Batches) -> Batches:
    spec = parsed_rows.spec
    counts = CountsOfRows(spec, parsed_rows.level, Features(spec, FittedState(), ahead=False))
    to_count: list[pa.RecordBatch] = []
    counted: list[pa.RecordBatch] = []
    for parsed, rows in parsed_rows.parsed(lines):
        if file is not None:
            file.write(rows)
        else:
            for part in slices(rows):
                yield _result(rows=one_value(write_stream([part], rows.schema)))
        if spec.rows.relational:
            counted += counts_of_parsed(spec, parsed)
            continue
        counted += counts.count_parsed(parsed)
        to_count.append(rows)
        if is_full(to_count, COUNT_ROWS):
            counted += counts.count_selected(*split_keys(pa.concat_batches(to_count)))
            yield from _count_cells(counted, parsed_rows.count_parts)
            to_count, counted = [], []
    if to_count:
        counted += counts.count_selected(*split_keys(pa.concat_batches(to_count)))
    yield from _count_cells(counted, parsed_rows.count_parts)


def _count_cells(counted: Sequence[pa.RecordBatch], parts: int) -> Batches:
    for cell in count_cells(counted, parts):
        yield _result(part=cell["part"][0].as_py(), counts=cell["counts"])


def _result(
    *,
    rows: pa.Array | None = None,
    file: str | None = None,
    part: int = 0,
    counts: pa.Array | None = None,
) -> pa.RecordBatch:
    nothing = pa.nulls(1, pa.binary())
    return pa.record_batch(
        [
            nothing if rows is None else rows,
            pa.array([file], pa.string()),
            pa.array([part], pa.int32()),
            nothing if counts is None else counts,
        ],
        ["rows", "file", "part", "counts"],
    )


def compute_places(
    batch: pa.RecordBatch, before: Before, seen: Counter[tuple[str, int]]
) -> npt.NDArray[np.float64]:
    """Returns the place of each row in the input, as a share of all rows. `seen` counts the rows of each part so
    far."""
    firsts, total = before
    found = []
    for part in zip(batch["_file"].to_pylist(), batch["_from"].to_pylist(), strict=True):
        found.append(firsts[part] + seen[part])
        seen[part] += 1
    return np.array(found, float) / total
