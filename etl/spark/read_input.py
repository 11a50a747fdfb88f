"""`RawInput`: a job's input on Spark. Workers read it with Arrow. Spark reads text in other stores, and records over
several lines."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import (
    HEAD,
    TAIL,
    fault,
    headers_of,
    refuse_faults,
    refuse_header,
    rows_before,
    zstd_fault,
)
from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_files import InputFiles, Part
from sluice.etl.read.pieces import OPEN_BYTES, SPARK_ONLY
from sluice.etl.spark.columns import SPARK_TYPES, quoted
from sluice.etl.spark.joins import relate
from sluice.etl.spark.session import PARTITIONS, frame_bytes
from sluice.etl.spark.side_tables import SideTable
from sluice.etl.spark.workers.parsed_rows import DOT, Before, ParsedRows, rows_with_ties
from sluice.etl.spark.workers.task_rows import TaskRows, work_on_rows
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table_files import versioned

if TYPE_CHECKING:
    from pyspark.core.broadcast import Broadcast
    from pyspark.sql import Column, DataFrame, SparkSession

_READERS = 8
_SORTABLE = re.compile(r"0+|0000-00-00([ T]00:00(:00(\.0+)?)?)?Z?")
"""Texts that sort as times do, with each digit written as 0: digits alone, or a date and a time as in ISO 8601."""
_FORMS = 3
"""The most forms of texts that a message shows."""
_ARROW_STORES = ("file:", "s3://")
"""Workers read text in these stores. Spark reads text in all others, with Hadoop's clients and their settings."""
_ROWS_OF_PARTS = "file string, start bigint, rows bigint"


def check_paths(paths: Iterable[str]) -> None:
    """Raises an InputError if a local path or glob matches nothing, before Spark starts. Spark checks the others: those
    in other stores, those with braces, and those without a scheme if Hadoop's settings may add one."""
    has_hadoop_settings = any(os.environ.get(name) for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"))
    for path, _ in map(versioned, paths):
        local = re.sub("^file:(//)?", "", path)
        is_local = local != path or ("://" not in path and not has_hadoop_settings)
        if is_local and "{" not in local and next(glob.iglob(local), None) is None:
            raise InputError(f"{path}: matches no file")


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

    @property
    def headers(self) -> tuple[str, ...]:
        return headers_of(self.spec.input)

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

    @cached_property
    def _sent(self) -> Broadcast[Sequence[tuple[Part, ...]]]:
        return self.spark.sparkContext.broadcast(self._tasks)

    def _task_rows(self, *, located: bool, with_headers: bool = False) -> TaskRows | None:
        if self.files is None:
            return None
        sent = self._sent
        heads = [] if with_headers else self.headers
        encoded = tuple(header.encode(self.spec.input.encoding) for header in heads)
        return TaskRows(lambda: sent.value, encoded, located)

    @property
    def bytes(self) -> int:
        """The size of the input, or Spark's estimate."""
        if self.files is not None:
            return self.files.bytes
        return frame_bytes(self.read())

    def map(
        self,
        work: Callable[[Batches], Batches],
        schema: str,
        *,
        with_file: bool = False,
        placed: bool = False,
    ) -> DataFrame:
        """Calls a function in the workers on the rows before parsing. See `read` for their columns."""
        rows = self._task_rows(located=with_file or placed, with_headers=with_file)
        if rows is None:
            return self.read(with_file, placed).mapInArrow(partial(work), schema)
        return self._numbers.mapInArrow(partial(work_on_rows, rows, work), schema)

    def read(self, with_file: bool = False, placed: bool = False) -> DataFrame:
        """Returns the input's rows before parsing, as Spark reads them.

        - Text: a column `line`, the bytes of each line with its end.
        - CSV over several lines: the bytes of each cell, and `_broken`, the text of a record with too few or too many.

        `with_file` adds each row's file, and the offset of its part of the file. Headers are then rows, too. `placed`
        adds the same, but no headers."""
        from pyspark.sql import functions as sql

        with self._explain_path_errors():
            located = with_file or placed
            extra = [sql.col("_metadata.file_path").alias("_file")] if located else []
            if self.spec.input.multiline:
                return self._read_multiline_csv(*extra)
            # The parser removes the carriage return that may precede a line feed.
            lines = (
                self.spark.read.option("recursiveFileLookup", "true")
                .option("lineSep", "\n")
                .text(list(self.paths))
            )
            if located:
                extra.append(sql.col("_metadata.file_block_start").alias("_from"))
            # Headers stay if lines are numbered.
            if not with_file and self.headers:
                bare = sql.rtrim("value", sql.lit("\r")).cast("binary")
                heads = [
                    sql.lit(header.encode(self.spec.input.encoding)) for header in self.headers
                ]
                lines = lines.where(~bare.isin(*heads))
            ended = sql.concat(sql.col("value"), sql.lit("\n"))
            return lines.select(ended.cast("binary").alias("line"), *extra)

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
        files = self.read(with_file=True).inputFiles()
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
        before = self.rows_before if self.spec.input.place else None
        rows = self._task_rows(located=before is not None)
        return ParsedRows(self.spec, self.level, self.count_parts, before, rows)

    @cached_property
    def parsed(self) -> DataFrame:
        """The input's good rows, or where they are stored, and their counts. The first pass parses them."""
        if self.files is not None:
            return self.parsed_rows.parse(self._numbers)
        return self.parsed_rows.parse(self.read(placed=self.parsed_rows.before is not None))

    @cached_property
    def count_parts(self) -> int:
        """The number of parts in which counts are added up. A worker has one part in memory, so that a part has the
        counts of two partitions, some 64 MiB of input."""
        partitions = int(self.spark.conf.get(PARTITIONS) or 1)
        return max(self.spark.sparkContext.defaultParallelism, partitions // 2)

    @cached_property
    def rows_before(self) -> Before:
        """The number of rows before each part of the input, and the number of all rows."""
        counted = self.map(_count_rows_of_parts, _ROWS_OF_PARTS, placed=True).collect()
        sums: Counter[tuple[str, int]] = Counter()
        for file, start, rows in counted:
            sums[file, start] += rows
        return rows_before(sums)

    @cached_property
    def rows(self) -> DataFrame:
        """The rows that fitting and writing read: as they are stored, or columns after dedup, joins and histories. The
        names of these columns have `DOT` for each dot, because pyspark does not quote names for its workers."""
        if not self.spec.rows.relational:
            return self.parsed.select("rows", "file", "part").where("counts is null")
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


def _count_rows_of_parts(batches: Batches) -> Batches:
    """Counts the rows of each part of a file. Runs in a worker."""
    for batch in batches:
        parts = pa.table([batch["_file"], batch["_from"]], ["file", "start"])
        counted = parts.group_by(["file", "start"]).aggregate([([], "count_all")])
        yield from counted.rename_columns(["file", "start", "rows"]).to_batches()


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

    Spark does not notice each damage. It accepts a .bz2 file that was cut off between two blocks, and reads a file that
    is not bzip2 as empty. It reads a .zst file up to the frame that is cut off, so the heads of all blocks are checked.
    A .gz file that is cut off needs no check, because its reader fails."""
    compressed = [file for file in files if file.endswith((".gz", ".bz2", ".zst"))]
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
            if file.endswith(".zst"):
                return zstd_fault(read, size)
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
