"""`sum_counts`: counts with Spark what operators learn from, in one pass over the input's rows.

Workers read parsed rows (`sluice.etl.spark.workers.parsed_rows`) and run the operators' own code. They count the values
of their task, and add up the counts of all tasks (`sluice.etl.spark.workers.cells`). The driver collects the sums
of the vocabularies that are small enough. The others are written to files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame

from sluice.etl.apply.counts import (
    COUNT_ROWS,
    CountsOfRows,
    join_batches,
    split_keys,
)
from sluice.etl.apply.parse import Batches, InputParser
from sluice.etl.apply.row_counts import COUNTS, RowCounts
from sluice.etl.jobs.engine import Sums, too_many_values
from sluice.etl.ops.base import MAX_VALUES
from sluice.etl.spark.large import Large
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.workers.cells import count_cells, read_counts, sum_cells
from sluice.etl.spark.workers.mapped_lookup import load_features
from sluice.etl.spark.workers.parsed_rows import ParsedRows, name_files, with_dots
from sluice.etl.spec.spec import Learned
from sluice.etl.table.fitted_state import FittedState, Packed

_PARTS = "part int, counts binary"


def sum_counts(
    raw: RawInput,
    level: int | None,
    state: FittedState,
    wanted: Mapping[int, Learned],
    large: Large,
) -> Sums:
    """Returns the counts that the operators of one level learn from, and the counts of rows. The driver collects them.
    Vocabularies that are too large for the driver are written to files."""
    least = {key: learned.op.least for key, learned in wanted.items()}
    sums = (
        _count_rows(raw, level, state)
        .repartitionById(raw.count_parts, "part")
        .mapInArrow(partial(sum_cells, least), "key int, sums bigint, counts binary")
        .persist(StorageLevel.DISK_ONLY)
    )
    try:
        of_keys = sums.select("key", "sums").toArrow().group_by("key").aggregate([("sums", "sum")])
        sizes = dict(zip(of_keys["key"].to_pylist(), of_keys["sums_sum"].to_pylist(), strict=True))
        chosen = large.choose(
            sizes, [key for key, learned in wanted.items() if raw.spec.may_be_stored(learned)]
        )
        if sum(size for key, size in sizes.items() if key not in chosen) > MAX_VALUES:
            raise too_many_values(raw.files.named, MAX_VALUES)
        stored = large.of_level(level or 0).write(
            sums.where(sums["key"].isin(chosen))
            .select("counts")
            .mapInArrow(partial(read_counts), "key int, value string, count bigint"),
            {key: wanted[key].op for key in chosen},
            sum(sizes[key] for key in chosen),
        )
        table = _collect(sums.where(~sums["key"].isin(chosen)))
    finally:
        sums.unpersist(blocking=True)
    before = None
    if not level and raw.spec.rows.relational:
        before = RowCounts.of(_collect(raw.parsed))
    return Sums(table, stored, before)


def _collect(cells: DataFrame) -> pa.Table:
    """Returns all counts of cells."""
    return pa.Table.from_batches(read_counts(cells.select("counts").toArrow().to_batches()), COUNTS)


def _count_rows(raw: RawInput, level: int | None, state: FittedState) -> DataFrame:
    """Returns cells with the counts of each task. Parsing has counted those of the first level already, unless the spec
    has joins or histories."""
    if not level and not raw.spec.rows.relational:
        return raw.parsed.select("part", "counts").where("counts is not null")
    shipped = raw.spark.sparkContext.broadcast(state.packed())
    count = partial(_count_in_worker, raw.parsed_rows, level, lambda: shipped.value)
    return raw.rows.mapInArrow(count, _PARTS)


@name_files
def _count_in_worker(
    parsed: ParsedRows, level: int | None, packed: Callable[[], Packed], batches: Batches
) -> Batches:
    """Counts the values that this level learns from. Runs in a worker."""
    spec, parts = parsed.spec, parsed.count_parts
    counts = CountsOfRows(spec, level, load_features(spec, packed())[1])
    if spec.rows.relational:
        parser = InputParser(spec)
        for batch in join_batches(batches, COUNT_ROWS):
            yield from count_cells(list(counts.of(parser.parse(with_dots(batch)))), parts)
        return
    for rows in join_batches(parsed.read(batches), COUNT_ROWS):
        yield from count_cells(list(counts.count_selected(*split_keys(rows))), parts)
