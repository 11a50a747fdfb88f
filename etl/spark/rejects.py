"""Rows that do not parse, with Spark: `write_rejects` keeps them, where `check_rejects` allows it."""

from __future__ import annotations

import base64
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.apply.lines import bare
from sluice.etl.apply.parse import Batches, InputParser
from sluice.etl.spark.read_input import InputError, Raw
from sluice.etl.spec.spec import Spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAMES = ["file", "start", "line", "lines", "reason", "raw", "base64"]
_FILES = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")


def check_rejects(spark: SparkSession, url: str) -> None:
    """Refuses a folder that holds anything but the rejects of an earlier job: its content is going to be replaced."""
    jvm, conf = spark._jvm, spark.sparkContext._jsc.hadoopConfiguration()
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(url)
    system = path.getFileSystem(conf)
    if not system.exists(path):
        return
    found = [(status.getPath().getName(), status.isFile()) for status in system.listStatus(path)]
    other = next((name for name, plain in found if not plain or not _FILES.fullmatch(name)), None)
    if other is not None:
        raise InputError(f"--rejects {url}: holds {other!r}, which no job set aside and which would be removed; name "
                         "another folder")


def write_rejects(raw: Raw, url: str) -> None:
    """Writes rows that do not parse as JSON lines of file, line, reason and raw text, and, where the text cannot show
    every byte, base64 of them. Lines are numbered from 1; records over several lines and rows of columns have no
    number."""
    from pyspark.sql import functions as sql

    found = raw.read(with_file=True).mapInArrow(
        partial(_rejects, raw.spec, raw.header),
        "file string, start bigint, line bigint, lines bigint, reason string, raw string, base64 string").persist()
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


def _rejects(spec: Spec, header: str, batches: Batches) -> Batches:
    """In a worker: returns rejects with their numbers in their parts of files, and how many lines each part has."""
    parser, head = InputParser(spec), header.encode()
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
            pa.array([coded for _, coded in texts], pa.string())], _NAMES)
    nothing = pa.nulls(len(lines), pa.string())
    yield pa.record_batch([
        pa.array([file for file, _ in lines], pa.string()), pa.array([start for _, start in lines], pa.int64()),
        pa.nulls(len(lines), pa.int64()), pa.array(list(lines.values()), pa.int64()), nothing, nothing, nothing],
        _NAMES)


def _text(row: dict[str, Any]) -> tuple[str, str | None]:
    """A row as text, and its bytes in base64 if they are not text."""
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
