"""`parse_into_cells`: parses the input once, and stores the rows for all passes.

A cell has some rows as an Arrow stream, so that Spark moves bytes and not values. Cells are on the executors' disks
(`spark.local.dir`). If an executor is lost, Spark parses its part of the input again, with the same result.

Most functions here run in the workers, on batches of cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

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
)
from sluice.etl.apply.features import Features
from sluice.etl.apply.parse import Batches, InputParser, Parsed
from sluice.etl.spark.workers.cells import one_value, read_stream, slices, write_stream
from sluice.etl.spark.workers.count_cells import count_cells
from sluice.etl.spark.workers.part_of_input import name_part
from sluice.etl.spec.row_split import TIES, Keys, row_keys, ties
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Before: TypeAlias = tuple[Mapping[tuple[str, int], int], int]
"""See `sluice.etl.apply.input_checks.rows_before`."""
ROWS = 1 << 15
"""The number of rows to which operators are applied together."""
_NAMES = ["rows", "part", "counts"]
_CELLS = "rows binary, part int, counts binary"


def parse_into_cells(
    lines: DataFrame, spec: Spec, level: int | None, parts: int, before: Before | None = None
) -> DataFrame:
    """Returns cells with the parsed rows, and cells with the counts that the operators of `level` learn from, in so
    many parts. Later passes read them from a disk, with `read_rows` and `sluice.etl.spark.fit`. `before` has the number
    of rows before each part of the input, and of all rows."""
    from pyspark import StorageLevel

    return lines.mapInArrow(partial(_parse, spec, level, parts, before), _CELLS).persist(
        StorageLevel.DISK_ONLY
    )


def read_rows(batches: Batches) -> Batches:
    """Yields the rows of cells."""
    for batch in batches:
        for rows in batch["rows"].drop_null():
            yield from read_stream(rows)


def rows_with_ties(spec: Spec, batches: Batches) -> Batches:
    """Yields the rows of cells for joins and histories, with the columns that order rows of the same time."""
    for rows in read_rows(batches):
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        hashes = [pa.array(tie.view(np.int64)) for tie in ties(columns, spec)]
        yield pa.record_batch([*rows.columns, *hashes], [*rows.schema.names, *TIES])


def with_keys(rows: pa.RecordBatch) -> tuple[dict[str, pa.Array], Keys]:
    """Returns the columns of a cell's rows, and the keys of the rows."""
    *columns, keys = rows.columns
    return dict(zip(rows.schema.names, columns, strict=False)), keys.to_numpy()


def selected_rows(
    spec: Spec, batches: Batches
) -> Iterator[tuple[dict[str, pa.Array], Keys | None]]:
    """Yields the rows that filters and the sample keep. `batches` are cells, or columns after joins and histories."""
    if spec.rows.relational:
        parser = InputParser(spec)
        yield from (selected(spec, parser.parse(batch)) for batch in batches)
    else:
        yield from map(with_keys, join_batches(read_rows(batches), ROWS))


@name_part
def _parse(
    spec: Spec, level: int | None, parts: int, before: Before | None, batches: Batches
) -> Batches:
    """Yields cells with the parsed rows, and cells with their counts.

    For joins and histories, cells have all rows that parse. Otherwise they have the rows that filters and the sample
    keep, with their keys, and the counts for the operators of `level`."""
    parser = InputParser(spec)
    counts = CountsOfRows(spec, level, Features(spec, FittedState(), ahead=False))
    seen = Counter[tuple[str, int]]()
    to_count: list[pa.RecordBatch] = []
    counted: list[pa.RecordBatch] = []
    for batch in batches:
        parsed = parser.parse(batch, compute_places(batch, before, seen) if before else None)
        if spec.rows.relational:
            yield from _row_cells(_to_batch(spec, parsed))
            counted += counts_of_parsed(spec, parsed)
            continue
        columns, keys = selected(spec, parsed)
        keys = row_keys(columns, spec) if keys is None else keys
        rows = pa.record_batch([*columns.values(), pa.array(keys)], [*columns, "_key"])
        yield from _row_cells(rows)
        counted += counts.count_parsed(parsed)
        to_count.append(rows)
        if is_full(to_count, COUNT_ROWS):
            counted += counts.count_selected(*with_keys(pa.concat_batches(to_count)))
            yield from _count_cells(counted, parts)
            to_count, counted = [], []
    if to_count:
        counted += counts.count_selected(*with_keys(pa.concat_batches(to_count)))
    yield from _count_cells(counted, parts)


def _row_cells(rows: pa.RecordBatch) -> Batches:
    for part in slices(rows):
        cell = one_value(write_stream([part], rows.schema))
        yield pa.record_batch([cell, pa.array([0], pa.int32()), pa.nulls(1, pa.binary())], _NAMES)


def _count_cells(counted: Sequence[pa.RecordBatch], parts: int) -> Batches:
    for cells in count_cells(counted, parts):
        yield pa.record_batch([pa.nulls(1, pa.binary()), *cells.columns], _NAMES)


def compute_places(
    batch: pa.RecordBatch, before: Before, seen: Counter[tuple[str, int]]
) -> npt.NDArray[np.float64]:
    """Returns the place of each row in the input, as a share of all rows. `seen` counts the rows of each part so
    far."""
    firsts, total = before
    found = []
    for number, part in enumerate(
        zip(batch["_file"].to_pylist(), batch["_from"].to_pylist(), strict=True)
    ):
        found.append(
            firsts[part]
            + (seen[part] if "line" in batch.schema.names else batch["_at"][number].as_py())
        )
        seen[part] += 1
    return np.array(found, float) / total


def _to_batch(spec: Spec, parsed: Parsed) -> pa.RecordBatch:
    return pa.record_batch(
        [parsed.columns[name] for name in spec.input.with_place], list(spec.input.with_place)
    )
