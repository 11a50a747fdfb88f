"""`write_rejects`: writes the rejected rows with Spark. `check_rejects` checks the folder for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from sluice.etl.apply.parse import Batches
from sluice.etl.apply.rejected import Reject, RejectFinder, check_rejects_folder
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.workers.last_features import load_features
from sluice.etl.spark.workers.parsed_rows import Before, compute_places, with_dots
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState, Packed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Late: TypeAlias = Callable[[], Packed] | None
"""Returns what was learned, to find the rows whose features cannot be published. None: only rows that do not parse."""
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
    """Raises an InputError if the folder has other files than the rejects of an earlier job, because its content will
    be replaced."""
    jvm, conf = spark._jvm, spark.sparkContext._jsc.hadoopConfiguration()
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(url)
    system = path.getFileSystem(conf)
    if not system.exists(path):
        return
    found = [(status.getPath().getName(), status.isFile()) for status in system.listStatus(path)]
    check_rejects_folder(url, found)


def write_rejects(raw: RawInput, url: str, state: FittedState | None = None) -> dict[str, int]:
    """Writes the rejected rows as JSON lines, and returns their number by reason. Each has file, line, reason and raw
    text, and the bytes in base64 if they are no text.

    These are the rows that do not parse. With a `state`, they also are those whose features cannot be published.
    Lines are numbered from 1. Rows of columns and records over several lines have no
    number. After joins and histories, rows have no file either."""
    from pyspark.sql import functions as sql

    shipped = None if state is None else raw.spark.sparkContext.broadcast(state.packed())
    late = None if shipped is None else lambda: shipped.value
    before = raw.rows_before if late is not None and raw.spec.input.place else None
    alone = None if raw.spec.rows.relational else late
    found = raw.map(
        partial(_find_rejects, raw.spec, raw.headers, alone, before),
        _TYPES,
        with_file=True,
        placed=before is not None,
    )
    if raw.spec.rows.relational:
        found = found.unionByName(
            raw.rows.mapInArrow(partial(_find_rejects_of_relations, raw.spec, late), _TYPES)
        )
    found = found.persist()
    try:
        # Spark reads a file in parts. A line's number is its number in the part plus the lines of earlier parts.
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


def find_reject_of(spark: SparkSession, url: str, reason: str) -> Reject | None:
    """Returns one of the rows that were rejected for this reason."""
    row = (
        spark.read.schema("file string, line bigint, reason string, raw string, base64 string")
        .json(url)
        .where(f"reason = {json.dumps(reason)}")
        .first()
    )
    return None if row is None else Reject(**row.asDict())


def _make_finder(late: _Late, spec: Spec, headers: Collection[bytes] = ()) -> RejectFinder:
    features = None if late is None else load_features(spec, late(), ahead=False)[1]
    return RejectFinder(spec, headers, features)


def _find_rejects_of_relations(spec: Spec, late: _Late, batches: Batches) -> Batches:
    """Yields the rejects after joins and histories. Runs in a worker."""
    finder = _make_finder(late, spec)
    for batch in batches:
        yield _batch([(None, None, None, None, *rest) for _, *rest in finder.of(with_dots(batch))])


def _find_rejects(
    spec: Spec,
    headers: tuple[str, ...],
    late: _Late,
    before: Before | None,
    batches: Batches,
) -> Batches:
    """Yields rejects with their numbers in their part of a file, and the number of lines of each part. Runs in a
    worker."""
    encoded = [header.encode(spec.input.encoding) for header in headers]
    finder = _make_finder(late, spec, encoded)
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
            finder.of(batch)
            if before is None
            else finder.of(batch, partial(compute_places, before=before, seen=seen))
        )
        yield _batch([(files[n], starts[n], numbers[n], None, *rest) for n, *rest in given])
    yield _batch([(*part, None, count, None, None, None) for part, count in lines.items()])


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)],
        schema=_SCHEMA,
    )
