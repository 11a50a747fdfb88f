"""What the first pass parsed, kept for the passes after it: `parsed_cells`, a frame of few, large cells.

A cell holds some rows as an Arrow stream, so that Spark moves bytes and not values. Cells lie on the executors' disks
(`spark.local.dir`); what is lost with an executor is parsed again, and comes out the same."""

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
    COUNTS,
    CountsOfRows,
    counts_of_parsed,
    enough,
    join_batches,
    selected,
)
from sluice.etl.apply.features import Features
from sluice.etl.apply.parse import Batches, InputParser, Parsed
from sluice.etl.spark.workers.part_of_input import naming_part
from sluice.etl.spec.row_split import TIES, Keys, row_keys, ties
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Before: TypeAlias = tuple[Mapping[tuple[str, int], int], int]
"""See `sluice.etl.apply.input_checks.rows_before`."""
CELL_BYTES = 4 << 20  # Java holds a cell five times on its way to the disk
ROWS = 1 << 15
"""How many rows operators are applied to at once."""
_CELLS = "rows binary, counts binary"


def parsed_cells(
    lines: DataFrame, spec: Spec, level: int | None, before: Before | None = None
) -> DataFrame:
    """Parses what was read, and counts it for a `level`, once: whoever takes `rows_of` or `counts_of` it in a later
    pass finds it on a disk. `before` says of each part of the input how many rows lie before it, and how many there
    are."""
    from pyspark import StorageLevel

    return lines.mapInArrow(partial(_parsed, spec, level, before), _CELLS).persist(
        StorageLevel.DISK_ONLY
    )


def rows_of(batches: Batches) -> Batches:
    """In a worker: the rows of cells."""
    for batch in batches:
        for rows in batch["rows"]:
            yield from _opened(rows)


def rows_with_ties(spec: Spec, batches: Batches) -> Batches:
    """In a worker: the rows of cells that are to meet other rows, with what orders those of one moment."""
    for rows in rows_of(batches):
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        hashes = [pa.array(tie.view(np.int64)) for tie in ties(columns, spec)]
        yield pa.record_batch([*rows.columns, *hashes], [*rows.schema.names, *TIES])


def counts_of(batches: Batches) -> Batches:
    """In a worker: what was counted of cells when they were parsed."""
    for batch in batches:
        for counted in batch["counts"]:
            yield from _opened(counted)


def with_keys(rows: pa.RecordBatch) -> tuple[dict[str, pa.Array], Keys]:
    """The columns of a cell's rows, and their keys."""
    return dict(zip(rows.schema.names[:-1], rows.columns[:-1], strict=True)), rows.columns[
        -1
    ].to_numpy()


def selected_rows(
    spec: Spec, batches: Batches
) -> Iterator[tuple[dict[str, pa.Array], Keys | None]]:
    """In a worker: the rows that filters and the sample leave, of cells, or of columns where rows met other rows."""
    if spec.rows.relational:
        parser = InputParser(spec)
        yield from (selected(spec, parser.parse(batch)) for batch in batches)
    else:
        yield from map(with_keys, join_batches(rows_of(batches), ROWS))


@naming_part
def _parsed(spec: Spec, level: int | None, before: Before | None, batches: Batches) -> Batches:
    """In a worker: parses, and counts what can be counted of all rows before any is left out. Rows that are going to
    meet other rows are kept all; of the others those that filters and the sample leave, with their keys, and what a
    first `level` learns from is counted of many together, while they are here."""
    parser = InputParser(spec)
    counts = CountsOfRows(spec, level, Features(spec, FittedState(), ahead=False))
    seen = Counter[tuple[str, int]]()
    held: list[pa.RecordBatch] = []
    for batch in batches:
        parsed = parser.parse(batch, places_of(batch, before, seen) if before else None)
        if spec.rows.relational:
            yield from _cells(_columns(spec, parsed), list(counts_of_parsed(spec, parsed)))
            continue
        columns, keys = selected(spec, parsed)
        keys = row_keys(columns, spec) if keys is None else keys
        rows = pa.record_batch([*columns.values(), pa.array(keys)], [*columns, "_key"])
        yield from _cells(rows, list(counts.count_parsed(parsed)))
        held.append(rows)
        if enough(held, COUNT_ROWS):
            yield from _counted(counts, held)
            held = []
    if held:
        yield from _counted(counts, held)


def _counted(counts: CountsOfRows, held: list[pa.RecordBatch]) -> Batches:
    """What is counted of rows, in cells that have no rows."""
    for found in counts.count_selected(*with_keys(pa.concat_batches(held))):
        step = max(1, -(-found.num_rows // max(1, -(-found.nbytes // CELL_BYTES))))
        for start in range(0, found.num_rows, step):
            yield _cell(_stream([], held[0].schema), _stream([found.slice(start, step)], COUNTS))


def places_of(
    batch: pa.RecordBatch, before: Before, seen: Counter[tuple[str, int]]
) -> npt.NDArray[np.float64]:
    """Where the rows lie in the input; of each part as many were `seen` already."""
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


def _columns(spec: Spec, parsed: Parsed) -> pa.RecordBatch:
    return pa.record_batch(
        [parsed.columns[name] for name in spec.input.with_place], list(spec.input.with_place)
    )


def _cells(rows: pa.RecordBatch, counts: Sequence[pa.RecordBatch]) -> Batches:
    """Cuts rows that are wide, so that no cell is much larger than `CELL_BYTES`; the first has the counts."""
    step = max(1, -(-rows.num_rows // max(1, -(-rows.nbytes // CELL_BYTES))))
    for start in range(0, max(1, rows.num_rows), step):
        yield _cell(
            _stream([rows.slice(start, step)], rows.schema),
            _stream([] if start else counts, COUNTS),
        )


def _cell(rows: pa.Buffer, counts: pa.Buffer) -> pa.RecordBatch:
    return pa.record_batch([_of_one(rows), _of_one(counts)], ["rows", "counts"])


def _stream(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue()


def _of_one(cell: pa.Buffer) -> pa.Array:
    """An array of one value, which is not copied."""
    return pa.Array.from_buffers(
        pa.binary(), 1, [None, pa.py_buffer(np.array([0, cell.size], np.int32)), cell]
    )


def _opened(cell: pa.BinaryScalar) -> Iterator[pa.RecordBatch]:
    # Copied, as a cell may begin anywhere in its batch, and arithmetic wants its numbers aligned.
    yield from pa.ipc.open_stream(cell.as_py())
