"""`RawInput`: reads a job's input with Spark, as a frame of lines or, from formats with columns, of columns."""

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
from urllib.parse import unquote

import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import (
    HEAD,
    TAIL,
    common_type,
    fault,
    headers_of,
    refuse_differences,
    refuse_faults,
    refuse_header,
    refuse_missing,
    rows_before,
    zstd_fault,
)
from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_paths import InputFile, files_of
from sluice.etl.read.pieces import OPEN_BYTES, SPARK_ONLY, FileRange, split_into_tasks
from sluice.etl.read.text_checks import check_text
from sluice.etl.spark.columns import (
    NANOSECONDS,
    SPARK_TYPES,
    cast_column,
    may_lose,
    quoted,
    read_types,
)
from sluice.etl.spark.joins import choose_join, relate, select_side_columns
from sluice.etl.spark.located_files import (
    FILE,
    ROW,
    metadata,
    read_tables,
    with_constants,
)
from sluice.etl.spark.session import PARTITIONS, frame_bytes
from sluice.etl.spark.table_folders import refuse_tables
from sluice.etl.spark.workers.parsed_rows import DOT, Before, ParsedRows, rows_with_ties
from sluice.etl.spark.workers.task_lines import TaskLines, work_on_lines
from sluice.etl.spec.input_values import spark_name
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table_columns import FileColumns, partitions_of, refuse_twice
from sluice.etl.table.table_files import TableFiles, versioned

if TYPE_CHECKING:
    from pyspark.core.broadcast import Broadcast
    from pyspark.sql import Column, DataFrame, SparkSession

_READERS = 8
_SORTABLE = re.compile(r"0+|0000-00-00([ T]00:00(:00(\.0+)?)?)?Z?")
"""Texts that sort as times do, with each digit written as 0: digits alone, or a date and a time as in ISO 8601."""
_FORMS = 3
"""The most forms of texts that a message shows."""
_ARROW_STORES = ("file://", "s3://")
"""Workers read text in these stores. Spark reads all others, with Hadoop's clients and their settings."""
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
    def files(self) -> list[InputFile] | None:
        """The text files that workers read with Arrow, as the local engine does. None: Spark reads the input."""
        source = self.spec.input
        if source.has_columns or source.multiline or not all(map(self._is_for_arrow, self.paths)):
            return None
        files = files_of(self.paths)
        return None if any(file.path.endswith(SPARK_ONLY) for file in files) else files

    def _is_for_arrow(self, path: str) -> bool:
        if "://" in path:
            return path.startswith(_ARROW_STORES)
        jvm: Any = self.spark._jvm
        conf = self.spark.sparkContext._jsc.hadoopConfiguration()
        store = jvm.org.apache.hadoop.fs.FileSystem.getDefaultUri(conf).getScheme()
        return path.startswith("file:") or store == "file"

    @cached_property
    def _tasks(self) -> list[tuple[FileRange, ...]]:
        """The ranges of `files` that each task reads."""
        assert self.files is not None
        conf: Any = self.spark._jsparkSession.sessionState().conf()
        total = sum(file.size + OPEN_BYTES for file in self.files)
        of_core = max(OPEN_BYTES, -(-total // self.spark.sparkContext.defaultParallelism))
        return split_into_tasks(self.files, min(int(conf.filesMaxPartitionBytes()), of_core))

    @cached_property
    def _numbers(self) -> DataFrame:
        """A partition for each task, with its number as `id`."""
        return self.spark.range(0, len(self._tasks), 1, max(1, len(self._tasks)))

    @cached_property
    def _sent(self) -> Broadcast[list[tuple[FileRange, ...]]]:
        return self.spark.sparkContext.broadcast(self._tasks)

    def _lines(self, *, located: bool, with_headers: bool = False) -> TaskLines | None:
        if self.files is None:
            return None
        sent = self._sent
        heads = [] if with_headers else self.headers
        encoded = tuple(header.encode(self.spec.input.encoding) for header in heads)
        return TaskLines(lambda: sent.value, encoded, located)

    @property
    def bytes(self) -> int:
        """The size of the input, or Spark's estimate."""
        if self.files is not None:
            return sum(file.size for file in self.files)
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
        lines = self._lines(located=with_file or placed, with_headers=with_file)
        if lines is None:
            return self.read(with_file, placed).mapInArrow(partial(work), schema)
        return self._numbers.mapInArrow(partial(work_on_lines, lines, work), schema)

    def read(self, with_file: bool = False, placed: bool = False) -> DataFrame:
        """Returns the input's rows before parsing, as Spark reads them.

        - Text: a column `line`, the bytes of each line with its end.
        - CSV over several lines: the bytes of each cell, and `_broken`, the text of a record with too few or too many.
        - Parquet and Delta: the input's columns, and `_bad`, the first column whose value does not fit its type.

        `with_file` adds each row's file, and the offset of its part of the file. Headers are then rows, too. `placed`
        adds the same, and for Parquet the row's number in the file, but no headers."""
        from pyspark.sql import functions as sql

        with self._explain_path_errors():
            if self.spec.input.has_columns:
                frame = self._read_columns()
                extra = [sql.col(FILE)] if with_file or placed else []
                if placed:
                    extra += [sql.lit(0).cast("bigint").alias("_from"), sql.col(ROW)]
                stored = dict(frame.dtypes)
                if self.spec.input.format == "parquet":
                    types = self._stored_types.items()
                    stored |= {name: kind for name, kind in types if kind == NANOSECONDS}
                typed = {
                    name: cast_column(self.named, name, stored[name], kind)
                    for name, kind in self.spec.input.read_as.items()
                }
                return frame.select(
                    *(column.alias(name) for name, column in typed.items()),
                    self._find_misfits(frame, typed).alias("_bad"),
                    *extra,
                )
            extra = [sql.col("_metadata.file_path").alias(FILE)] if with_file or placed else []
            if self.spec.input.multiline:
                return self._read_multiline_csv(*extra)
            # The parser removes the carriage return that may precede a line feed.
            lines = (
                self.spark.read.option("recursiveFileLookup", "true")
                .option("lineSep", "\n")
                .text(list(self.paths))
            )
            if with_file or placed:
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

    def _read_columns(self) -> DataFrame:
        """Reads Parquet, or the files of tables, with `FILE` and `ROW`."""
        from pyspark.sql import functions as sql

        source = self.spec.input
        if source.is_table:
            tables = [TableFiles.open(path) for path in self.paths]
            frame = read_tables(self.spark, tables, source.columns)
        else:
            constants = self._partitions
            schema = ", ".join(
                f"{quoted(name)} {kind}"
                for name, kind in self._stored_types.items()
                if not any(name in one.constants for one in constants.values())
            )
            schema = schema.replace(NANOSECONDS, "bigint")
            frame = (
                self.spark.read.schema(schema)
                .option("recursiveFileLookup", "true")
                .parquet(*self.paths)
            )
            frame = frame.withColumns(
                {
                    name: sql.lit(None).cast(SPARK_TYPES[source.read_as[name]])
                    for name in source.optional
                    if name not in self._stored_types
                }
            )
            frame = with_constants(frame.select("*", *metadata()), constants)
        refuse_missing(self.named, frame.columns, source.columns)
        return frame

    @cached_property
    def _parquet_files(self) -> list[str]:
        with self._explain_path_errors():
            files = (
                self.spark.read.option("recursiveFileLookup", "true")
                .text(list(self.paths))
                .inputFiles()
            )
            # The files are listed as text, so that Spark reads no footer before this check.
            refuse_tables(self.spark, files)
        return sorted(str(file) for file in files)

    @cached_property
    def _partitions(self) -> dict[str, FileColumns]:
        """For each Parquet file, the columns that the names of its folders have and the spec names."""
        kinds = self.spec.input.read_as
        files = [unquote(file) for file in self._parquet_files]
        texts = [name for name, kind in kinds.items() if kind == "text"]
        found = partitions_of(files, texts)
        return {file: one.of(kinds) for file, one in zip(files, found, strict=True)}

    @cached_property
    def _stored_types(self) -> dict[str, str]:
        """The columns of Parquet files that the spec names, with a type to which those of all files convert."""
        source = self.spec.input
        files = read_types(self.spark, self._parquet_files, source.columns)
        for (file, types), one in zip(files.items(), self._partitions.values(), strict=True):
            refuse_twice(file, types, one)
            constants = {name: spark_name(value.type) for name, value in one.constants.items()}
            files[file] = {**types, **constants}
        refuse_differences(files, source.read_as, source.optional)
        found = {}
        for name, kind in source.read_as.items():
            types = {one[name]: file for file, one in files.items() if name in one}
            if types and (common := common_type(types, kind)):
                found[name] = common
            if {"bigint", "double"} <= {*types, found.get(name, "")}:
                raise InputError(
                    f"{types['bigint']}: column {name!r} holds bigint, and double in others, which Spark "
                    "does not read together; run the job with `sluice etl --engine local`, or write the "
                    "files with one type"
                )
        refuse_missing(
            self.named,
            dict.fromkeys(name for one in files.values() for name in one),
            [name for name in source.columns if name not in source.optional],
        )
        return found

    def _find_misfits(self, frame: DataFrame, typed: Mapping[str, Column]) -> Column:
        """Returns the name of the first column whose value does not fit its type."""
        from pyspark.sql import functions as sql

        kinds = dict(frame.dtypes)
        bad = sql.lit(None).cast("string")
        for name, kind in reversed(list(self.spec.input.read_as.items())):
            if may_lose(kinds[name], kind):
                lost = frame[quoted(name)].isNotNull() & typed[name].isNull()
                bad = sql.when(lost, sql.lit(name)).otherwise(bad)
        return bad

    def check_headers(self) -> None:
        """Raises an InputError if a file's header or columns differ from the spec's, or if a compressed file is
        damaged."""
        source = self.spec.input
        if source.format == "parquet":
            _ = self._stored_types
        if self.files is not None:
            with ThreadPool(_READERS) as pool:
                check_text(self.files, source, pool.imap)
            return
        if not source.has_columns:
            files = self.read(with_file=True).inputFiles()
            check_compressed(self.spark, files)
        if source.header:
            for path, line in _first_lines(self.spark, files, source.encoding):
                refuse_header(path, line, source)

    @cached_property
    def joins(self) -> dict[str, str]:
        """For each side table, by its path, how it is joined."""
        return {
            join.path: choose_join(join, select_side_columns(self.spark, join, self.spec))
            for join in self.spec.rows.joins
        }

    @cached_property
    def parsed_rows(self) -> ParsedRows:
        before = self.rows_before if self.spec.input.place else None
        lines = self._lines(located=before is not None)
        return ParsedRows(self.spec, self.level, self.count_parts, before, lines)

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
        return relate(typed, self.spec, self.earlier).persist()

    def files_of(self, part: int) -> list[str]:
        """Returns the files that the task with this number reads in the first pass."""
        from py4j.protocol import Py4JError

        if self.files is not None:
            return list(dict.fromkeys(one.file.name_in_rejects for one in self._tasks[part]))

        partition = self.read()._jdf.queryExecution().toRdd().partitions()[part]
        try:
            return [str(file.toPath()) for file in partition.files()]
        except Py4JError:  # the part of a table whose columns have several names
            return []

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
