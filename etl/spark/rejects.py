"""Rows that do not parse, with Spark: `write_rejects` keeps them, where `check_rejects` allows it."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.apply.parse import Batches, InputParser
from sluice.etl.apply.rejected import Reject, refuse_others, texts_of
from sluice.etl.spark.read_input import Raw
from sluice.etl.spec.spec import Spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TYPES = "file string, start bigint, line bigint, lines bigint, reason string, raw string, base64 string"
_SCHEMA = pa.schema([(name, pa.int64() if kind == "bigint" else pa.string())
                     for name, kind in (column.split() for column in _TYPES.split(", "))])


def check_rejects(spark: SparkSession, url: str) -> None:
    """Refuses a folder that holds anything but the rejects of an earlier job: its content is going to be replaced."""
    jvm, conf = spark._jvm, spark.sparkContext._jsc.hadoopConfiguration()
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(url)
    system = path.getFileSystem(conf)
    if not system.exists(path):
        return
    found = [(status.getPath().getName(), status.isFile()) for status in system.listStatus(path)]
    refuse_others(url, found)


def write_rejects(raw: Raw, url: str) -> None:
    """Writes rows that do not parse as JSON lines of file, line, reason and raw text, and, where the text cannot show
    every byte, base64 of them. Lines are numbered from 1; records over several lines and rows of columns have no
    number."""
    from pyspark.sql import functions as sql

    found = raw.read(with_file=True).mapInArrow(
        partial(_rejects, raw.spec, raw.headers),
        _TYPES).persist()
    try:
        # Each file comes in parts: a line's number is its number in its part plus the lines of earlier parts.
        parts = found.where("lines is not null").select("file", "start", "lines").collect()
        before: dict[str, int] = {}
        firsts = []
        for file, start, lines in sorted(parts):
            firsts.append((file, start, before.get(file, 0)))
            before[file] = before.get(file, 0) + lines
        offsets = raw.spark.createDataFrame(firsts, "file string, start bigint, first bigint")
        numbered = found.where("lines is null").join(sql.broadcast(offsets), ["file", "start"], "left").select(
            "file", (sql.col("line") + sql.col("first")).alias("line"), "reason", "raw", "base64")
        numbered.write.mode("overwrite").json(url)
    finally:
        found.unpersist()


def reject_of(spark: SparkSession, url: str, reason: str) -> Reject | None:
    """One of the rows that were written for this reason."""
    row = spark.read.schema("file string, line bigint, reason string, raw string, base64 string").json(url).where(
        f"reason = {json.dumps(reason)}").first()
    return None if row is None else Reject(**row.asDict())


def _rejects(spec: Spec, headers: tuple[str, ...], batches: Batches) -> Batches:
    """In a worker: returns rejects with their numbers in their parts of files, and how many lines each part has."""
    parser, heads = InputParser(spec), [header.encode(spec.input.encoding) for header in headers]
    lines: dict[tuple[str, int], int] = {}
    for batch in batches:
        numbers: list[int | None] = [None] * batch.num_rows
        starts, files = [0] * batch.num_rows, batch["_file"].to_pylist()
        if "line" in batch.schema.names:
            starts = batch["_from"].to_pylist()
            for number, part in enumerate(zip(files, starts, strict=True)):
                numbers[number] = lines[part] = lines.get(part, 0) + 1
        found = [(files[n], starts[n], numbers[n], None, *rest)
                 for n, *rest in texts_of(batch, parser.parse(batch), heads)]
        yield _batch(found)
    yield _batch([(*part, None, count, None, None, None) for part, count in lines.items()])


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    return pa.record_batch([pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)],
                           schema=_SCHEMA)
