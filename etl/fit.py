"""Spark's part: `Raw` reads what comes in, `fit` learns in one job, `write` applies and places rows in another.

The workers get lines, or columns, as Arrow batches, parse them and run the operators' own code; what crosses back to
Spark is, for fitting, counts per batch, and for writing, finished columns with a place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from etl.commit import arrow_schema
from etl.features import Features, Placement
from etl.ops import Fitted
from etl.ops.base import as_number, as_text
from etl.parse import Parser
from etl.spec import Spec
from etl.state import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Batches = Iterator[pa.RecordBatch]
_ROWS_KEY, _REJECT_KEY = -2, -1
_COUNT_ROWS = 1 << 18  # rows over which a worker counts before it hands on what it counted
_SPARK_TYPES = {"int": "bigint", "float": "double", "text": "string"}


class InputError(ValueError):
    """Input that cannot be read: its message names the path, and what is wrong."""


@dataclass(frozen=True)
class Raw:
    """The input as Spark reads it: a frame of lines, or of columns for formats that have them."""

    spark: SparkSession
    spec: Spec
    paths: tuple[str, ...]

    def frame(self, with_file: bool = False) -> DataFrame:
        from pyspark.errors import AnalysisException
        from pyspark.sql import functions as sql

        extra = [sql.col("_metadata.file_path").alias("_file")] if with_file else []
        reader = self.spark.read.option("recursiveFileLookup", "true")
        try:
            if self.spec.input.format != "parquet":
                # Only a line feed ends a line here: a carriage return before it is taken off below.
                lines = reader.option("lineSep", "\n").text(list(self.paths))
                value = sql.rtrim(sql.col("value"), sql.lit("\r"))
                if self.spec.input.header:  # it stands at the head of every file
                    lines = lines.where(value != self.spec.input.delimiter.join(self.spec.input.columns))
                ended = sql.concat(value, sql.lit("\n"))
                return lines.select(ended.cast("binary").alias("line"), *extra)
            frame = reader.parquet(*self.paths)
            missing = [name for name in self.spec.input.columns if name not in frame.columns]
            if missing:
                raise InputError(f"{', '.join(self.paths)}: there is no column {missing[0]!r} "
                                 f"(there are: {', '.join(frame.columns)})")
            return frame.select(*[sql.col(name).cast(_SPARK_TYPES[kind]).alias(name)
                                  for name, kind in self.spec.input.columns.items()], *extra)
        except AnalysisException as error:
            if error.getCondition() == "PATH_NOT_FOUND":
                raise InputError(f"{', '.join(self.paths)}: matches no file") from None
            raise InputError(f"{', '.join(self.paths)}: cannot be read ({str(error).splitlines()[0]})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one pass over the input found."""

    rows: int
    """Rows that parse."""
    rejected: dict[str, int]

    @classmethod
    def of(cls, table: pa.Table) -> Counted:
        found = {(row["key"], row["value"]): row["count"] for row in table.to_pylist()}
        return cls(rows=sum(count for (key, _), count in found.items() if key == _ROWS_KEY),
                   rejected={reason: count for (key, reason), count in sorted(found.items()) if key == _REJECT_KEY})


def fit(raw: Raw) -> tuple[State, Counted]:
    """One pass: every fitted operator's state, and the counts of good rows and of rejects by reason."""
    from pyspark.sql import functions as sql

    spec = raw.spec
    counts = _counted(raw, fitting=True)
    # Operators with equal parameters are fitted by one query; all queries share the one shuffle of `counts`.
    alike: dict[Fitted, list[int]] = {}
    for number, (_, _, op, _) in enumerate(spec.fitted):
        alike.setdefault(op, []).append(number)
    kept = counts.where(sql.col("key") < 0).withColumn("place", sql.lit(0))
    for op, numbers in alike.items():
        kept = kept.unionByName(op.fit(counts.where(sql.col("key").isin(numbers))))
    table = kept.toArrow().combine_chunks()
    keys = table["key"].to_numpy()
    tables = {key: op.learn(table.filter(pa.array(keys == number)).drop_columns("key"))
              for number, (_, key, op, _) in enumerate(spec.fitted)}
    return State(spec=spec.fitted_hash, tables=tables), Counted.of(table.filter(pa.array(keys < 0)))


def count(raw: Raw) -> Counted:
    """Good rows and rejects alone, where nothing is to be fitted."""
    return Counted.of(_counted(raw, fitting=False).toArrow())


def _counted(raw: Raw, fitting: bool) -> DataFrame:
    """Columns (key, value, count): key is the number of a fitted operator, or what `Counted` reads."""
    from pyspark.sql import functions as sql

    counts = raw.frame().mapInArrow(partial(_count, raw.spec, fitting), "key int, value string, count bigint")
    return counts.groupBy("key", "value").agg(sql.sum("count").alias("count"))


def _count(spec: Spec, fitting: bool, batches: Batches) -> Batches:
    """In a worker: counts of the fitted columns' values, of good rows, and of rejects."""
    parser = Parser(spec)
    for batch in _gathered(batches, _COUNT_ROWS):
        parsed = parser.parse(batch)
        yield _counts(_ROWS_KEY, pa.array(["rows"]), pa.array([parsed.rows]))
        if parsed.rejected:
            reasons, times = np.unique([reason for _, reason in parsed.rejected], return_counts=True)
            yield _counts(_REJECT_KEY, pa.array(reasons.tolist(), pa.string()), pa.array(times))
        for key, (column, _, op, number) in enumerate(spec.fitted if fitting else ()):
            values = parsed.columns[column.source]
            for before in column.ops[:number]:
                values = before.apply(as_text(values) if before.takes == "text" else as_number(values), None)
            yield _counts(key, *op.count(as_text(values) if op.takes == "text" else as_number(values)))


def _counts(key: int, values: pa.Array, counts: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([pa.array(np.full(len(values), key, np.int32)), values, counts.cast(pa.int64())],
                           ["key", "value", "count"])


def _gathered(batches: Batches, rows: int) -> Batches:
    """Joins batches to about that many rows: the larger, the more equal values a worker counts together."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= rows:
            yield pa.concat_batches(held)
            held = []
    if held:
        yield pa.concat_batches(held)


def write_rejects(raw: Raw, url: str) -> None:
    """Rows that do not parse as JSON lines of file, reason and raw text."""
    frame = raw.frame(with_file=True).mapInArrow(partial(_rejects, raw.spec), "file string, reason string, raw string")
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
        return bytes(row["line"]).removesuffix(b"\n").decode(errors="backslashreplace")
    return json.dumps({name: value for name, value in row.items() if name != "_file"})


def write(raw: Raw, state: State, placement: Placement, url: str) -> None:
    """Applies the operators, sends each row to its file, sorts each file by key, and writes plain Parquet."""
    from pyspark.sql import functions as sql

    spec = raw.spec
    schema = arrow_schema(spec.fields({}))
    columns = [f"`{f.name}` {_spark_type(f.type)} not null" for f in schema]
    shipped = raw.spark.sparkContext.broadcast(_packed(state))
    worker = partial(_apply, spec, placement, lambda: shipped.value)
    rows = raw.frame().mapInArrow(worker, ", ".join([*columns, "_key bigint not null", "_file int not null"]))
    # The writer wants rows in order of a partition column that is never null, else it sorts again and loses ours.
    *others, last = zip(placement.shares, np.cumsum(placement.files).tolist(), strict=True)
    split = sql.lit(last[0])
    for name, bound in reversed(others):
        split = sql.when(sql.col("_file") < bound, name).otherwise(split)
    placed = rows.repartitionById(placement.total, "_file").withColumn("split", split)
    placed = placed.sortWithinPartitions("split", "_key").select(*schema.names, "split")
    placed.write.partitionBy("split").options(**parquet_options(spec.table.row_group_rows)).parquet(url)
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


def _spark_type(kind: pa.DataType) -> str:
    return {"int8": "tinyint", "int32": "int", "float": "float"}[str(kind)]


def _packed(state: State) -> dict[str, bytes]:
    """A state as bytes that travel to the workers."""
    packed = {}
    for key, table in state.tables.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        packed[key] = sink.getvalue().to_pybytes()
    return packed


def _apply(spec: Spec, placement: Placement, packed: Callable[[], dict[str, bytes]], batches: Batches) -> Batches:
    """In a worker: finished columns, key and file number of each good row."""
    parser = Parser(spec)
    state = State(spec=spec.fitted_hash, tables={k: pa.ipc.open_stream(v).read_all() for k, v in packed().items()})
    features = Features(spec, state)
    names = [*[c.name for c in spec.columns], "_key", "_file"]
    for batch in batches:
        parsed = parser.parse(batch)
        keys = placement.keys(parsed.columns)
        files = placement.file(keys, placement.split(keys))
        yield pa.record_batch([*features.apply(parsed.columns), pa.array(keys.view(np.int64)), pa.array(files)], names)
