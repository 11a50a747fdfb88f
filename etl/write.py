"""Writing, with Spark: `write` applies the operators and places rows; `write_rejects` keeps what did not parse."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.features import Features, Keys, Placement, hash_of, row_keys, whole_rows
from etl.fit import selected
from etl.identity import Identity
from etl.joined import Joins
from etl.lines import bare
from etl.parse import Parser
from etl.raw import Batches, InputError, Raw
from etl.record import NO_PARTITION
from etl.shards import arrow_schema
from etl.sketch import Bounds, Gathered, Gathering, Sketch, gather
from etl.spec import Spec
from etl.state import Packed, State

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession

_REJECT_NAMES = ["file", "start", "line", "lines", "reason", "raw", "base64"]
_REJECTS = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")
_SPARK_TYPES = {"int8": "tinyint", "int32": "int", "int64": "bigint", "float": "float", "double": "double",
                "string": "string", "binary": "binary", "list<element: int32>": "array<int>"}


def check_rejects(spark: SparkSession, url: str) -> None:
    """Refuses a folder that holds anything but what an earlier job set aside: what is there is replaced."""
    jvm, conf = spark._jvm, spark.sparkContext._jsc.hadoopConfiguration()
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(url)
    system = path.getFileSystem(conf)
    if not system.exists(path):
        return
    found = [(status.getPath().getName(), status.isFile()) for status in system.listStatus(path)]
    other = next((name for name, plain in found if not plain or not _REJECTS.fullmatch(name)), None)
    if other is not None:
        raise InputError(f"--rejects {url}: holds {other!r}, which no job set aside and which would be removed; name "
                         "another folder")


def write_rejects(raw: Raw, url: str) -> None:
    """Rows that do not parse as JSON lines of file, line, reason and raw text, and, where the text cannot show every
    byte, base64 of them. Lines are numbered from 1; records over several lines and rows of columns have no number."""
    from pyspark.sql import functions as sql

    found = raw.read(with_file=True).mapInArrow(
        partial(_rejects, raw.spec, raw.header),
        "file string, start bigint, line bigint, lines bigint, reason string, raw string, base64 string").persist()
    try:
        # Each file comes in parts: a line's number is its number in its part, and the lines of the parts before.
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


def _rejects(spec: Spec, header: str, batches: Batches) -> Batches:
    """In a worker: rejects with their numbers in their parts of files, and how many lines each part has."""
    parser, head = Parser(spec), header.encode()
    lines: dict[tuple[str, int], int] = {}
    for batch in batches:
        rejected = dict(parser.parse(batch).rejected)
        numbers: list[int | None] = [None] * batch.num_rows
        starts = [0] * batch.num_rows
        if "line" in batch.schema.names:
            starts = batch["_from"].to_pylist()
            for number, part in enumerate(zip(batch["_file"].to_pylist(), starts, strict=True)):
                numbers[number] = lines[part] = lines.get(part, 0) + 1
        if head:
            rejected = {number: reason for number, reason in rejected.items()
                        if "line" not in batch.schema.names or bare(batch["line"][number].as_py()) != head}
        rows = batch.take(pa.array(list(rejected), pa.int64())).to_pylist()
        texts = [_text(row) for row in rows]
        none: list[None] = [None] * len(rows)
        yield pa.record_batch([
            pa.array([row["_file"] for row in rows], pa.string()), pa.array([starts[n] for n in rejected], pa.int64()),
            pa.array([numbers[n] for n in rejected], pa.int64()), pa.array(none, pa.int64()),
            pa.array(list(rejected.values()), pa.string()), pa.array([text for text, _ in texts], pa.string()),
            pa.array([coded for _, coded in texts], pa.string())], _REJECT_NAMES)
    nothing = pa.nulls(len(lines), pa.string())
    yield pa.record_batch([
        pa.array([file for file, _ in lines], pa.string()), pa.array([start for _, start in lines], pa.int64()),
        pa.nulls(len(lines), pa.int64()), pa.array(list(lines.values()), pa.int64()), nothing, nothing, nothing],
        _REJECT_NAMES)


def _text(row: dict[str, Any]) -> tuple[str, str | None]:
    """A row as text, and its bytes in base64 if they are no text."""
    if "line" in row:
        content = bare(row["line"])
    elif "_broken" in row:
        cells = b",".join(value or b"" for name, value in row.items() if name not in ("_file", "_broken"))
        content = cells if row["_broken"] is None else row["_broken"].encode("latin-1")
    else:
        return json.dumps({name: value for name, value in row.items() if name not in ("_file", "_bad")},
                          default=str), None
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return content.decode(errors="backslashreplace"), base64.b64encode(content).decode()


def write(raw: Raw, state: State, placement: Placement, url: str, joins: Joins, *, rows: int,
          before: Identity | None = None) -> dict[str, dict[str, Sketch]]:
    """Applies the operators, sends each row to its file, sorts each file by key, and writes plain Parquet. Of its about
    so many `rows` it returns sketches, by how they are recognised: by this table's rule, and, if that is another than
    the one `before`, by that, too."""
    from pyspark.sql import functions as sql

    spec = raw.spec
    schema = arrow_schema(spec.fields({}))
    types = {f.name: f"`{f.name}` {_SPARK_TYPES[str(f.type)]} not null" for f in schema}
    columns = [*(kind for name, kind in types.items() if name not in joins.names), *joins.types]
    context = raw.spark.sparkContext
    order = [*(["_first"] if placement.sorted_by_value else []), "_key", *(["_row"] if placement.has_ties else [])]
    columns += ["_first double not null"] if placement.sorted_by_value else []
    columns += ["_row bigint not null"] if placement.has_ties else []
    nothing: Gathered = {}
    rules = [spec.rule, *([before] if before and before.recognition != spec.rule.recognition else [])]
    look = _Look(rules=tuple(rules), bounds=Bounds.of(rows, spec.table.split), splits=tuple(spec.table.split),
                 gathered=context.accumulator(nothing, Gathering()))  # type: ignore[arg-type]
    shipped = context.broadcast(joins.shipped(state).packed())
    worker = partial(_apply, placement, joins, look, lambda: shipped.value)
    columns += ["_key bigint not null", "_file int not null"]
    placed = joins.closed(raw.frame.mapInArrow(worker, ", ".join(columns)), state, types)
    # A file lies in one split, so rows need no order by split: by one number alone they are sorted fastest. A writer
    # that may keep two files open leaves that order alone; else it sorts by split first, and loses ours.
    raw.spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", "2")
    *others, last = zip(spec.table.split, placement.ends, strict=True)
    split = sql.lit(last[0])
    for name, bound in reversed(others):
        split = sql.when(sql.col("_file") < bound, name).otherwise(split)
    placed = placed.repartitionById(placement.total, "_file").withColumn("split", split)
    folders = ["split"]
    if placement.pairs:
        values = sql.array(*[sql.lit(value) for value in placement.partitions])
        placed = placed.withColumn("partition", sql.coalesce(sql.get(values, "_file"), sql.lit(NO_PARTITION)))
        folders.append("partition")
    placed = placed.sortWithinPartitions(*order).select(*[f"`{n}`" for n in schema.names], *folders)
    placed.write.partitionBy(*folders).options(**parquet_options(spec.table.row_group_rows)).parquet(url)
    shipped.unpersist()
    return look.bounds.sketches(look.gathered.value)


def parquet_options(row_group_rows: int) -> dict[str, str]:
    """Row groups of an exact size, in the codec and encoding that decode fastest, with a checksum a page."""
    return {
        "compression": "lz4_raw", "parquet.enable.dictionary": "false", "parquet.page.write-checksum.enabled": "true",
        "parquet.block.row.count.limit": str(row_group_rows), "parquet.block.size": str(2**31 - 1),
        # A failed task's output must not be visible, which only the first algorithm promises.
        "mapreduce.fileoutputcommitter.algorithm.version": "1",
        "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """In a worker: takes of each row that it writes what sketches need."""

    rules: tuple[Identity, ...]
    """The first is that of the rows' keys."""
    bounds: Bounds
    splits: tuple[str, ...]
    gathered: Accumulator[Gathered]

    def at(self, split: npt.NDArray[np.int32], columns: Mapping[str, pa.Array], keys: Keys) -> Gathered:
        found: Gathered = {}
        for number, rule in enumerate(self.rules):
            as_keys = number == 0 and rule.recognised == rule.columns
            hashes = keys if as_keys else hash_of(columns, rule.recognised, rule.seed)
            for place, name in enumerate(self.splits):
                if len(small := self.bounds.smallest(name, hashes[split == place])):
                    found[rule.recognition, name] = small
        return found


def _apply(placement: Placement, joins: Joins, look: _Look, packed: Callable[[], Packed], batches: Batches
           ) -> Batches:
    """In a worker: finished columns, key and file number of each good row."""
    spec = placement.spec
    parser, state = Parser(spec), State.unpacked(spec.fitted_hash, packed())
    features, seen = Features(spec, state), Gathered()
    names = [*(c.name for c in spec.columns if c.name not in joins.names), *joins.columns,
             *(["_first"] if placement.sorted_by_value else []), *(["_row"] if placement.has_ties else []),
             "_key", "_file"]
    for batch in batches:
        columns, keys = selected(spec, parser.parse(batch))
        keys = row_keys(columns, spec) if keys is None else keys
        if spec.rows.negatives:
            columns = spec.rows.negatives.drawn(columns, spec.label, keys, state["rows/negatives/0"])
            keys = row_keys(columns, spec)
        split = placement.split(keys, columns)
        gather(seen, look.at(split, columns, keys))
        files, first = placement.place(features, columns, keys, split)
        made = [*features.apply(columns, keys, joins.names), *joins.opened(features, columns, keys)]
        yield pa.record_batch([*made, *([] if first is None else [first]),
                               *([pa.array(whole_rows(columns).view(np.int64))] if placement.has_ties else []),
                               pa.array(keys.view(np.int64)), pa.array(files)], names)
    look.gathered.add(seen)
