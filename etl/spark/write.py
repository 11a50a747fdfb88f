"""`write`: applies the operators with Spark, and writes the table's files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.etl.apply.features import FileAssignment
from sluice.etl.apply.parse import Batches
from sluice.etl.apply.row_placement import RowPlacement, SketchInputs
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.vocabulary.join import PlacesFolder, RequestedPlaces, VocabularyJoins
from sluice.etl.spark.vocabulary.large import COMMIT_OPTIONS
from sluice.etl.spark.workers.part_of_input import name_part
from sluice.etl.spark.workers.placed_rows import PlacedRows
from sluice.etl.spec.row_identity import Identity
from sluice.etl.table.data_files import arrow_schema, with_dictionaries
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.job_record import NO_PARTITION
from sluice.etl.table.sketch import Gathered, Sketch, SketchSum

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame

_SPARK_TYPES = {
    "int8": "tinyint",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "list<element: int32>": "array<int>",
    "list<element: int64>": "array<bigint>",
    "list<element: string>": "array<string>",
    "list<element: double>": "array<double>",
}


def write(
    raw: RawInput,
    state: FittedState,
    placement: FileAssignment,
    url: str,
    joins: VocabularyJoins,
    *,
    folder: PlacesFolder,
    rows: int,
    before: Identity | None = None,
) -> dict[str, dict[str, Sketch]]:
    """Applies the operators, sorts the rows of each file, and writes Parquet. Returns sketches of the rows, by
    recognition and split: by this table's rule, and also by the rule `before`, if that is another one. There are about
    `rows` rows. `folder` is for the places that values have in vocabularies in files.
    """
    spec = raw.spec
    schema = arrow_schema(spec.fields({}))
    types = {
        f.name: f"`{f.name}` {_SPARK_TYPES[str(f.type)]}{'' if f.nullable else ' not null'}"
        for f in schema
    }
    columns = list(types.values())
    context = raw.spark.sparkContext
    order = [
        *(["_first"] if placement.sorted_by_value else []),
        "_key",
        *(["_row"] if placement.has_ties else []),
    ]
    columns += ["_first double not null"] if placement.sorted_by_value else []
    columns += ["_row bigint not null"] if placement.has_ties else []
    nothing: Gathered = {}
    gathered = context.accumulator(nothing, SketchSum())  # type: ignore[arg-type]
    look = SketchInputs.of(placement, rows, before)
    shipped = context.broadcast(joins.for_workers(state).packed())
    placed_rows = PlacedRows(placement, look, lambda: shipped.value)
    columns += ["_key bigint not null", "_file int not null"]
    with folder.found(raw.frame, placed_rows, joins, state) as places:
        worker = partial(_apply, placed_rows, joins, places, gathered)
        _write_files(raw.frame.mapInArrow(worker, ", ".join(columns)), placement, url, order)
    shipped.unpersist(blocking=True)
    return look.bounds.sketches(gathered.value)


def _write_files(placed: DataFrame, placement: FileAssignment, url: str, order: list[str]) -> None:
    """Sorts the rows of each file, and writes Parquet."""
    from pyspark.sql import functions as sql

    spec = placement.spec
    schema = arrow_schema(spec.fields({}))
    # A file is in one split, so rows need no order by split, and a sort by one number is fastest. Spark's writer keeps
    # this order if it may have two files open. Otherwise it sorts by split first.
    placed.sparkSession.conf.set("spark.sql.maxConcurrentOutputFileWriters", "2")
    *others, last = zip(spec.table.split, placement.ends, strict=True)
    split = sql.lit(last[0])
    for name, bound in reversed(others):
        split = sql.when(sql.col("_file") < bound, name).otherwise(split)
    placed = placed.repartitionById(placement.total, "_file").withColumn("split", split)
    folders = ["split"]
    if placement.pairs:
        values = sql.array(*[sql.lit(value) for value in placement.partitions])
        placed = placed.withColumn(
            "partition", sql.coalesce(sql.get(values, "_file"), sql.lit(NO_PARTITION))
        )
        folders.append("partition")
    placed = placed.sortWithinPartitions(*order).select(*[f"`{n}`" for n in schema.names], *folders)
    placed.write.partitionBy(*folders).options(
        **parquet_options(spec.table.row_group_rows, with_dictionaries(schema))
    ).parquet(url)


def parquet_options(row_group_rows: int, texts: Sequence[str] = ()) -> dict[str, str]:
    """Returns Parquet options: row groups of an exact size, the codec and encoding that decode fastest, and a checksum
    for each page. Columns of `texts` have a dictionary, so that the loader's operators see each value once."""
    return {
        **{f"parquet.enable.dictionary#{name}": "true" for name in texts},
        "compression": "lz4_raw",
        "parquet.enable.dictionary": "false",
        "parquet.page.write-checksum.enabled": "true",
        "parquet.block.row.count.limit": str(row_group_rows),
        "parquet.block.size": str(2**31 - 1),
        **COMMIT_OPTIONS,
    }


@name_part
def _apply(
    placed: PlacedRows,
    joins: VocabularyJoins,
    places: RequestedPlaces | None,
    gathered: Accumulator[Gathered],
    batches: Batches,
) -> Batches:
    """Yields the finished columns, the sort keys and the file of each good row. Runs in a worker."""
    placing, features = placed.load()
    made_here = [column.name for column in placed.spec.columns]
    names = [*made_here, *RowPlacement.order(placed.placement), "_file"]
    for block, parts in itertools.groupby(placed.blocks(batches), itemgetter(0)):
        of_block = features.with_prepared(places.of_block(block)) if places else features
        for _, (columns, keys) in parts:
            rows = placing.of(columns, keys)
            made = of_block.apply(rows.columns, rows.keys, (), rows.split, rows.folds)
            rows, made = placing.fit(rows, made, made_here, joins.names)
            joins.check_numbers(dict(zip(made_here, made, strict=True)))
            yield pa.record_batch([*made, *rows.order, pa.array(rows.files)], names)
    gathered.add(placing.seen)
