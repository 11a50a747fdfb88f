"""Rows that a table does not get, with Spark: `write_rejects` keeps them, where `check_rejects` allows it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.apply.parse import Batches
from sluice.etl.apply.rejected import Refused, Reject, refuse_others
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.workers.last_features import features_of
from sluice.etl.spark.workers.parsed_rows import Before, places_of
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState, Packed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TYPES = (
    "file string, start bigint, line bigint, lines bigint, reason string, raw string, base64 string"
)
_SCHEMA = pa.schema(
    [
        (name, pa.int64() if kind == "bigint" else pa.string())
        for name, kind in (column.split() for column in _TYPES.split(", "))
    ]
)


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


def write_rejects(
    raw: RawInput, url: str, state: FittedState | None = None, but: Collection[str] = ()
) -> dict[str, int]:
    """Writes rows that do not parse as JSON lines of file, line, reason and raw text, and, where the text cannot show
    every byte, base64 of them; with a `state`, also rows whose features cannot be published, not looking at columns
    that `but` names. Lines are numbered from 1; records over several lines and rows of columns have no number, and rows
    that met others no file either. Returns how many there are by reason."""
    from pyspark.sql import functions as sql

    shipped = None if state is None else raw.spark.sparkContext.broadcast(state.packed())
    late = None if shipped is None else _Late(lambda: shipped.value, but)
    before = raw.rows_before if late is not None and raw.spec.input.place else None
    alone = None if raw.spec.rows.relational else late
    found = raw.read(with_file=True, placed=before is not None).mapInArrow(
        partial(_rejects, raw.spec, raw.headers, alone, before), _TYPES
    )
    if raw.spec.rows.relational:
        found = found.unionByName(
            raw.frame.mapInArrow(partial(_related_rejects, raw.spec, late), _TYPES)
        )
    found = found.persist()
    try:
        # Each file comes in parts: a line's number is its number in its part plus the lines of earlier parts.
        parts = found.where("lines is not null").select("file", "start", "lines").collect()
        lines: dict[str, int] = {}
        firsts = []
        for file, start, count in sorted(parts):
            firsts.append((file, start, lines.get(file, 0)))
            lines[file] = lines.get(file, 0) + count
        offsets = raw.spark.createDataFrame(firsts, "file string, start bigint, first bigint")
        numbered = (
            found.where("lines is null")
            .join(sql.broadcast(offsets), ["file", "start"], "left")
            .select(
                "file",
                (sql.col("line") + sql.col("first")).alias("line"),
                "reason",
                "raw",
                "base64",
            )
        )
        numbered.write.mode("overwrite").json(url)
        return {
            row["reason"]: row["count"]
            for row in found.where("lines is null").groupBy("reason").count().collect()
        }
    finally:
        found.unpersist()


def reject_of(spark: SparkSession, url: str, reason: str) -> Reject | None:
    """One of the rows that were written for this reason."""
    row = (
        spark.read.schema("file string, line bigint, reason string, raw string, base64 string")
        .json(url)
        .where(f"reason = {json.dumps(reason)}")
        .first()
    )
    return None if row is None else Reject(**row.asDict())


@dataclass(frozen=True, slots=True)
class _Late:
    """What finds rows whose features cannot be published."""

    packed: Callable[[], Packed]
    but: Collection[str]

    @staticmethod
    def refused(late: _Late | None, spec: Spec, headers: Collection[bytes] = ()) -> Refused:
        if late is None:
            return Refused(spec, headers)
        return Refused(spec, headers, features_of(spec, late.packed(), ahead=False)[1], late.but)


def _related_rejects(spec: Spec, late: _Late | None, batches: Batches) -> Batches:
    """In a worker: returns the rejects among rows that met others."""
    refused = _Late.refused(late, spec)
    for batch in batches:
        yield _batch([(None, None, None, None, *rest) for _, *rest in refused.of(batch)])


def _rejects(
    spec: Spec,
    headers: tuple[str, ...],
    late: _Late | None,
    before: Before | None,
    batches: Batches,
) -> Batches:
    """In a worker: returns rejects with their numbers in their parts of files, and how many lines each part has."""
    refused = _Late.refused(late, spec, [header.encode(spec.input.encoding) for header in headers])
    seen = Counter[tuple[str, int]]()
    lines: dict[tuple[str, int], int] = {}
    for batch in batches:
        numbers: list[int | None] = [None] * batch.num_rows
        starts, files = [0] * batch.num_rows, batch["_file"].to_pylist()
        if "line" in batch.schema.names:
            starts = batch["_from"].to_pylist()
            for number, part in enumerate(zip(files, starts, strict=True)):
                numbers[number] = lines[part] = lines.get(part, 0) + 1
        given = (
            refused.of(batch)
            if before is None
            else refused.of(batch, partial(places_of, before=before, seen=seen))
        )
        yield _batch([(files[n], starts[n], numbers[n], None, *rest) for n, *rest in given])
    yield _batch([(*part, None, count, None, None, None) for part, count in lines.items()])


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)],
        schema=_SCHEMA,
    )
