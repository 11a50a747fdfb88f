"""Writing, with Spark: `write` applies the operators and places rows; `write_rejects` keeps what did not parse."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from etl.features import Features, Placement, row_keys
from etl.fit import selected
from etl.joined import Joins
from etl.parse import Parser
from etl.raw import Batches, Raw
from etl.record import NO_PARTITION
from etl.shards import arrow_schema
from etl.spec import Spec
from etl.state import Packed, State

_SPARK_TYPES = {"int8": "tinyint", "int32": "int", "int64": "bigint", "float": "float", "double": "double",
                "string": "string", "binary": "binary", "list<element: int32>": "array<int>"}


def write_rejects(raw: Raw, url: str) -> None:
    """Rows that do not parse as JSON lines of file, reason and raw text."""
    frame = raw.read(with_file=True).mapInArrow(partial(_rejects, raw.spec), "file string, reason string, raw string")
    frame.write.mode("overwrite").json(url)


def _rejects(spec: Spec, batches: Batches) -> Batches:
    parser = Parser(spec)
    for batch in batches:
        if rejected := parser.parse(batch).rejected:
            rows = batch.take(pa.array([number for number, _ in rejected])).to_pylist()
            yield pa.record_batch([[row["_file"] for row in rows], [reason for _, reason in rejected],
                                   [_text(row) for row in rows]], ["file", "reason", "raw"])


def _text(row: dict[str, Any]) -> str:
    if "line" in row:
        return bytes(row["line"]).removesuffix(b"\n").rstrip(b"\r").decode(errors="backslashreplace")
    if "_broken" in row:
        cells = b",".join(value or b"" for name, value in row.items() if name not in ("_file", "_broken"))
        return (cells if row["_broken"] is None else row["_broken"].encode("latin-1")).decode(errors="backslashreplace")
    return json.dumps({name: value for name, value in row.items() if name not in ("_file", "_bad")}, default=str)


def write(raw: Raw, state: State, placement: Placement, url: str, joins: Joins) -> None:
    """Applies the operators, sends each row to its file, sorts each file by key, and writes plain Parquet."""
    from pyspark.sql import functions as sql

    spec = raw.spec
    schema = arrow_schema(spec.fields({}))
    types = {f.name: f"`{f.name}` {_SPARK_TYPES[str(f.type)]} not null" for f in schema}
    columns = [*(kind for name, kind in types.items() if name not in joins.names), *joins.types]
    order = ["_first", "_key"] if placement.sorted_by_value else ["_key"]
    columns += ["_first double not null"] if placement.sorted_by_value else []
    shipped = raw.spark.sparkContext.broadcast(joins.shipped(state).packed())
    worker = partial(_apply, spec, placement, joins, lambda: shipped.value)
    columns += ["_key bigint not null", "_file int not null"]
    rows = joins.closed(raw.frame.mapInArrow(worker, ", ".join(columns)), state, types)
    # A file lies in one split, so rows need no order by split: by one number alone they are sorted fastest. A writer
    # that may keep two files open leaves that order alone; else it sorts by split first, and loses ours.
    raw.spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", "2")
    *others, last = zip(spec.table.split, placement.ends, strict=True)
    split = sql.lit(last[0])
    for name, bound in reversed(others):
        split = sql.when(sql.col("_file") < bound, name).otherwise(split)
    placed = rows.repartitionById(placement.total, "_file").withColumn("split", split)
    folders = ["split"]
    if placement.pairs:
        values = sql.array(*[sql.lit(value) for value in placement.partitions])
        placed = placed.withColumn("partition", sql.coalesce(sql.get(values, "_file"), sql.lit(NO_PARTITION)))
        folders.append("partition")
    placed = placed.sortWithinPartitions(*order).select(*[f"`{n}`" for n in schema.names], *folders)
    placed.write.partitionBy(*folders).options(**parquet_options(spec.table.row_group_rows)).parquet(url)
    shipped.unpersist()


def parquet_options(row_group_rows: int) -> dict[str, str]:
    """Row groups of an exact size, in the codec and encoding that decode fastest, with a checksum a page."""
    return {
        "compression": "lz4_raw", "parquet.enable.dictionary": "false", "parquet.page.write-checksum.enabled": "true",
        "parquet.block.row.count.limit": str(row_group_rows), "parquet.block.size": str(2**31 - 1),
        # A failed task's output must not be visible, which only the first algorithm promises.
        "mapreduce.fileoutputcommitter.algorithm.version": "1",
        "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    }


def _apply(spec: Spec, placement: Placement, joins: Joins, packed: Callable[[], Packed], batches: Batches) -> Batches:
    """In a worker: finished columns, key and file number of each good row."""
    parser, state = Parser(spec), State.unpacked(spec.fitted_hash, packed())
    features = Features(spec, state)
    names = [*(c.name for c in spec.columns if c.name not in joins.names), *joins.columns,
             *(["_first"] if placement.sorted_by_value else []), "_key", "_file"]
    for batch in batches:
        columns, keys = selected(spec, parser.parse(batch))
        keys = row_keys(columns, spec) if keys is None else keys
        if spec.rows.negatives:
            columns = spec.rows.negatives.drawn(columns, spec.label, keys, state["rows/negatives/0"])
            keys = row_keys(columns, spec)
        files, first = placement.place(features, columns, keys)
        made = [*features.apply(columns, keys, joins.names), *joins.opened(features, columns, keys)]
        yield pa.record_batch([*made, *([] if first is None else [first]),
                               pa.array(keys.view(np.int64)), pa.array(files)], names)
