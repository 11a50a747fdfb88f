"""`RawInput`: a job's input on Spark. Workers read it with Arrow. Spark reads text in other stores, and records over
several lines."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import (
    HEAD,
    TAIL,
    fault,
    refuse_faults,
    refuse_header,
    rows_before,
)
from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_files import InputFiles, Part
from sluice.etl.read.pieces import OPEN_BYTES, SPARK_ONLY
from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.joins import relate
from sluice.etl.spark.session import PARTITIONS, frame_bytes
from sluice.etl.spark.side_tables import SideTable
from sluice.etl.spark.workers.parsed_rows import (
    COUNTED_PARTS,
    DOT,
    ParsedRows,
    count_rows_of_parts,
    reject_related,
    rows_with_ties,
)
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_READERS = 8
_SORTABLE = re.compile(r"0+|0000-00-00([ T]00:00(:00(\.0+)?)?)?Z?")
"""Texts that sort as times do, with each digit written as 0: digits alone, or a date and a time as in ISO 8601."""
_FORMS = 3
"""The most forms of texts that a message shows."""
_ARROW_STORES = ("file:", "s3://")
"""Workers read text in these stores. Spark reads text in all others, with Hadoop's clients and their settings."""


@dataclass(frozen=True)
class RawInput:
    """The input of a job as Spark reads it."""

    spark: SparkSession
    spec: Spec
    paths: tuple[str, ...]
    level: int | None = 0
    """The level of operators whose values are counted when rows are parsed. None counts only rows."""
    earlier: Mapping[str, str] = field(default_factory=dict)
    """For a job that appends: the files from which each history continues, by its name.
    `sluice.etl.spark.history_state` wrote them."""

    @property
    def named(self) -> str:
        return ", ".join(self.paths)

    @cached_property
    def files(self) -> InputFiles | None:
        """The files that workers read with Arrow, as the local engine does. None: Spark reads the input."""
        source = self.spec.input
        paths = self.paths if source.is_table else [*map(self._with_store, self.paths)]
        is_for_arrow = ("://" not in path or path.startswith(_ARROW_STORES) for path in paths)
        if source.multiline or not (source.has_columns or all(is_for_arrow)):
            return None
        files = InputFiles(source, paths)
        is_packed = any(file.path.endswith(SPARK_ONLY) for file in files.files)
        return None if is_packed and not source.has_columns else files

    def _with_store(self, path: str) -> str:
        """Returns a path with the store of Hadoop's `fs.defaultFS`, if the path names no store."""
        jvm: Any = self.spark._jvm
        conf = self.spark.sparkContext._jsc.hadoopConfiguration()
        hadoop = jvm.org.apache.hadoop.fs
        is_local = hadoop.FileSystem.getDefaultUri(conf).getScheme() == "file"
        if is_local or "://" in path or path.startswith("file:"):
            return path
        return str(hadoop.FileSystem.get(conf).makeQualified(hadoop.Path(path)).toString())

    @cached_property
    def _tasks(self) -> Sequence[tuple[Part, ...]]:
        """The parts of `files` that each task reads."""
        assert self.files is not None
        conf: Any = self.spark._jsparkSession.sessionState().conf()
        total = self.files.bytes + OPEN_BYTES * len(self.files.files)
        of_core = max(OPEN_BYTES, -(-total // self.spark.sparkContext.defaultParallelism))
        return self.files.tasks(min(int(conf.filesMaxPartitionBytes()), of_core))

    @cached_property
    def _numbers(self) -> DataFrame:
        """A partition for each task, with its number as `id`."""
        return self.spark.range(0, len(self._tasks), 1, max(1, len(self._tasks)))

    @property
    def bytes(self) -> int:
        """The size of the input, or Spark's estimate."""
        if self.files is not None:
            return self.files.bytes
        return frame_bytes(self._unparsed)

    @cached_property
    def _unparsed(self) -> DataFrame:
        """The numbers of tasks if workers read the input, otherwise its rows before parsing."""
        return self._read() if self.files is None else self._numbers

    def _read(self) -> DataFrame:
        """Returns the input's rows before parsing, as Spark reads them. `_file` is the file of a row, and `_from` the
        offset of its part there.

        - Text: a column `line`, the bytes of each line with its end.
        - CSV over several lines: the bytes of each cell, and `_broken`, the text of a record with too few or too
          many."""
        from pyspark.sql import functions as sql

        file = sql.col("_metadata.file_path").alias("_file")
        with self._explain_path_errors():
            if self.spec.input.multiline:
                return self._read_multiline_csv(file, sql.lit(0).cast("bigint").alias("_from"))
            # The parser removes the carriage return that may precede a line feed.
            lines = (
                self.spark.read.option("recursiveFileLookup", "true")
                .option("lineSep", "\n")
                .text(list(self.paths))
            )
            ended = sql.concat(sql.col("value"), sql.lit("\n")).cast("binary").alias("line")
            return lines.select(ended, file, sql.col("_metadata.file_block_start").alias("_from"))

    @contextlib.contextmanager
    def _explain_path_errors(self) -> Iterator[None]:
        """Turns Spark's errors about paths that it cannot read into an InputError."""
        from pyspark.errors import AnalysisException

        try:
            yield
        except AnalysisException as error:
            if error.getCondition() == "PATH_NOT_FOUND":
                raise InputError(f"{self.named}: matches no file") from None
            raise InputError(
                f"{self.named}: cannot be read ({str(error).splitlines()[0]})"
            ) from None

    def _read_multiline_csv(self, *extra: Column) -> DataFrame:
        """Reads CSV whose quoted fields may contain line ends. One task reads a whole file. The workers parse the bytes
        of the cells."""
        from pyspark.sql import functions as sql

        names = list(self.spec.input.columns)
        schema = ", ".join([*(f"`{name}` string" for name in names), "_broken string"])
        options = {
            "multiLine": "true",
            "sep": self.spec.input.delimiter,
            "quote": '"',
            "escape": '"',
            "encoding": "ISO-8859-1",
            "header": str(self.spec.input.header).lower(),
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": "_broken",
            "recursiveFileLookup": "true",
            "lineSep": "\n",
        }
        frame = self.spark.read.schema(schema).options(**options).csv(list(self.paths))
        # A carriage return before the line feed is not part of the last cell.
        last = frame[names[-1]]
        ended = sql.when(last != "\r", sql.rtrim(last, sql.lit("\r")))
        cells = [*(frame[name] for name in names[:-1]), ended]
        return frame.select(
            *[
                sql.encode(cell, "ISO-8859-1").alias(name)
                for name, cell in zip(names, cells, strict=True)
            ],
            "_broken",
            *extra,
        )

    def check(self) -> None:
        """Raises an InputError if a file's header or columns differ from the spec's, or if a compressed file is
        damaged."""
        if self.files is not None:
            self.files.check()
            return
        files = self._unparsed.inputFiles()
        check_compressed(self.spark, files)
        if self.spec.input.header:
            for path, line in _first_lines(self.spark, files, self.spec.input.encoding):
                refuse_header(path, line, self.spec.input)

    @cached_property
    def sides(self) -> list[SideTable]:
        """The side tables of the spec's joins."""
        return [SideTable(self.spark, join, self.spec) for join in self.spec.rows.joins]

    @cached_property
    def parsed_rows(self) -> ParsedRows:
        parts = None
        if self.files is not None:
            sent = self.spark.sparkContext.broadcast(self._tasks)
            parts = lambda: sent.value  # noqa: E731
        rows = ParsedRows(self.spec, self.level, self.count_parts, None, parts)
        if not self.spec.input.place:
            return rows
        counted = self._unparsed.mapInArrow(partial(count_rows_of_parts, rows), COUNTED_PARTS)
        sums: Counter[tuple[str, int]] = Counter()
        for file, start, count in counted.collect():
            sums[file, start] += count
        return replace(rows, before=rows_before(sums))

    @cached_property
    def parsed(self) -> DataFrame:
        """The input's good rows, or where they are stored, their counts, and the rejected rows. The first pass parses
        them."""
        return self.parsed_rows.parse(self._unparsed)

    def rejects(self) -> Batches:
        """Yields the rejected rows as `REJECTS`, also those that were rejected after joins and histories."""
        frames = [self.parsed]
        if self.spec.rows.relational:
            work = partial(reject_related, self.spec)
            frames.append(self.rows.mapInArrow(work, "rejects binary"))
        for frame in frames:
            cells = frame.select("rejects").where("rejects is not null")
            for row in cells.toLocalIterator(prefetchPartitions=True):
                yield from pa.ipc.open_stream(bytes(row["rejects"]))

    @cached_property
    def count_parts(self) -> int:
        """The number of parts in which counts are added up. A worker has one part in memory, so that a part has the
        counts of two partitions, some 64 MiB of input."""
        partitions = int(self.spark.conf.get(PARTITIONS) or 1)
        return max(self.spark.sparkContext.defaultParallelism, partitions // 2)

    @cached_property
    def rows(self) -> DataFrame:
        """The rows that fitting and writing read: as they are stored, or columns after dedup, joins and histories. The
        names of these columns have `DOT` for each dot, because pyspark does not quote names for its workers."""
        if not self.spec.rows.relational:
            return self.parsed.select("rows", "file", "part").where(
                "rows is not null or file is not null"
            )
        return self.related.toDF(*[name.replace(".", DOT) for name in self.related.columns])

    @cached_property
    def related(self) -> DataFrame:
        """The rows after dedup, joins and histories."""
        kinds = [
            f"{quoted(name)} {SPARK_TYPES[kind]}"
            for name, kind in self.spec.input.with_place.items()
        ]
        kinds += [f"{name} bigint" for name in TIES]
        typed = self.parsed.select("rows", "file", "part").mapInArrow(
            partial(rows_with_ties, self.parsed_rows), ", ".join(kinds)
        )
        check_time_orders(typed, self.spec)
        return relate(typed, self.spec, self.sides, self.earlier).persist()

    def release(self) -> None:
        """Removes the rows that Spark has stored for this input. Waits for the executors, because a session that ends
        before they answer prints errors."""
        for name in {"parsed", "related"} & self.__dict__.keys():
            getattr(self, name).unpersist(blocking=True)


def _first_lines(spark: SparkSession, files: list[str], encoding: str) -> Iterator[tuple[str, str]]:
    """Yields each file with its first line. It reads through Spark's file systems and codecs, so that it can read all
    that Spark reads."""
    jvm, context = spark._jvm, spark.sparkContext._jsc
    assert jvm is not None
    conf = context.hadoopConfiguration()
    codecs = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(conf)
    for file in files:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        stream = path.getFileSystem(conf).open(path)
        codec = codecs.getCodec(path)
        reader = jvm.java.io.BufferedReader(
            jvm.java.io.InputStreamReader(
                stream if codec is None else codec.createInputStream(stream), "ISO-8859-1"
            )
        )
        try:
            line = str(reader.readLine() or "").encode("latin-1").decode(encoding, "replace")
            # Spark skips a byte order mark, too.
            yield file, line.removeprefix("\ufeff")
        finally:
            reader.close()


def check_compressed(spark: SparkSession, files: Iterable[str]) -> None:
    """Raises an InputError that names the first damaged compressed file. Reads through Spark's file systems.

    Spark accepts a .bz2 file that was cut off between two blocks, and reads a file that is not bzip2 as empty. It would
    read a .zst file up to the frame that is cut off, so such files are refused. A .gz file that is cut off needs no
    check, because its reader fails."""
    if packed := next((file for file in files if file.endswith(".zst")), None):
        raise InputError(
            f"{packed}: only Spark can open this input, and it does not notice that a .zst file is cut short; "
            "decompress the file, or compress it as .gz"
        )
    compressed = [file for file in files if file.endswith((".gz", ".bz2"))]
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()

    def find_fault(file: str) -> str | None:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        system = path.getFileSystem(conf)
        size = int(system.getFileStatus(path).getLen())
        stream = system.open(path)

        def read(start: int, count: int) -> bytes:
            stream.seek(start)
            return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream, count))

        try:
            tail = min(size, TAIL)
            return fault(file, read(0, min(size, HEAD)), read(size - tail, tail))
        finally:
            stream.close()

    if compressed:
        with ThreadPool(_READERS) as pool:
            refuse_faults(zip(compressed, pool.imap(find_fault, compressed), strict=True))


def check_time_orders(frame: DataFrame, spec: Spec) -> None:
    """Raises an InputError if rows are ordered by a text column whose texts do not sort as times do. The frame has good
    rows as columns."""
    from pyspark.sql import functions as sql

    for key, name in _order_columns(spec):
        if spec.kinds.get(name) == "text" and name in spec.input.columns:
            cell = sql.col(f"`{name}`")
            form = sql.regexp_replace(cell, "[0-9]", "0").alias("form")
            rows = (
                frame.where(cell.isNotNull())
                .groupBy(form)
                .agg(sql.min(cell).alias("least"))
                .orderBy("form")
                .limit(_FORMS)
                .collect()
            )
            if (why := why_unsorted([(row["form"], row["least"]) for row in rows])) is not None:
                raise InputError(
                    f"{key} = {name!r}: holds text that does not sort as times do ({why}); nothing was "
                    "published; read the column as int or float, or write all its times alike, as in "
                    "2024-01-31 10:00:00"
                )


def _order_columns(spec: Spec) -> list[tuple[str, str]]:
    """Returns the options that name a column to order rows by, each with the column."""
    rows = spec.rows
    found = [("dedup.order", rows.dedup.order)] if rows.dedup and rows.dedup.order else []
    return [
        *found,
        *(
            ("lag.order" if history.lag else "history.order", history.order)
            for history in rows.histories
        ),
    ]


def why_unsorted(forms: Sequence[tuple[str, str]]) -> str | None:
    """Returns why texts do not sort as times do. None if they do: all have one form, and it is sortable. `forms` has
    each form with an example. A form is a text with each digit written as 0."""
    strange = next((example for form, example in forms if not _SORTABLE.fullmatch(form)), None)
    if strange is not None:
        return f"{strange[:100]!r} is no time"
    if len(forms) > 1:
        return " and ".join(repr(example) for _, example in forms[:2]) + " are not written alike"
    return None
