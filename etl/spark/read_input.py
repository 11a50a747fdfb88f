"""The input as Spark reads it: `RawInput`, a frame of lines, or of columns for formats that have them."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

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
from sluice.etl.apply.parse import INFINITY
from sluice.etl.spark.joins import SPARK_TYPES, joined_by, relate
from sluice.etl.spark.table_folders import refuse_tables
from sluice.etl.spark.workers.parsed_rows import Before, parsed_cells, rows_with_ties
from sluice.etl.spec.row_split import TIES
from sluice.etl.spec.spec import Spec
from sluice.etl.table.foreign_tables import files_of_delta

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_SAFE = {
    "int": ("tinyint", "smallint", "int", "bigint"),
    "text": ("string",),
    "float": ("tinyint", "smallint", "int", "bigint", "float", "double"),
}
_READERS = 8
_SORTS = re.compile(r"0+|0000-00-00([ T]00:00(:00(\.0+)?)?)?Z?")
_FORMS = 3  # how many forms are shown, each by an example
NANOSECONDS = "timestamp_ns"
"""What `types_of` calls times in nanoseconds, which Spark reads as whole numbers."""


def check_paths(paths: Iterable[str]) -> None:
    """Refuses a local path or glob that matches nothing, before Spark starts. Paths that only Spark understands are
    left to it: those in other stores, alternatives in braces, and paths without a scheme if Hadoop's settings may give
    them one."""
    elsewhere = any(os.environ.get(name) for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"))
    for path in paths:
        local = re.sub("^file:(//)?", "", path)
        known = local != path or ("://" not in path and not elsewhere)
        if known and "{" not in local and next(glob.iglob(local), None) is None:
            raise InputError(f"{path}: matches no file")


@dataclass(frozen=True)
class RawInput:
    """The input of a job, and how it is read."""

    spark: SparkSession
    spec: Spec
    paths: tuple[str, ...]
    level: int | None = 0
    """What is counted as rows are parsed: what the first level learns from, or None of that."""
    earlier: Mapping[str, str] = field(default_factory=dict)
    """Where each history continues from, by its name: what `sluice.etl.spark.history_state` wrote for the rows that are
    there already."""

    @property
    def named(self) -> str:
        return ", ".join(self.paths)

    @property
    def headers(self) -> tuple[str, ...]:
        return headers_of(self.spec.input)

    def read(self, with_file: bool = False, placed: bool = False) -> DataFrame:
        """Reads the input unchanged.

        The result has a column `line`, or the input's columns and `_bad`, the first column that does not fit. Records
        over several lines have the cells' bytes, and `_broken`, the text of a record with too few or too many cells.
        `with_file` adds the offset where a line's part of the file begins, and includes headers. `placed` adds a row's
        file, part and, for Parquet, its number there, without headers."""
        from pyspark.sql import functions as sql

        extra = [sql.col("_metadata.file_path").alias("_file")] if with_file or placed else []
        with self._named():
            if self.spec.input.format in ("parquet", "delta"):
                frame = self._columns()
                if placed:
                    extra += [
                        sql.lit(0).cast("bigint").alias("_from"),
                        sql.col("_metadata.row_index").alias("_at"),
                    ]
                cells = self._cells(frame)
                typed = self._typed(frame, cells)
                return frame.select(
                    *(column.alias(name) for name, column in typed.items()),
                    self._bad(frame, cells, typed).alias("_bad"),
                    *extra,
                )
            if self.spec.input.multiline:
                return self._records(*extra)
            # Only a line feed ends a line here: the parser removes a carriage return before it.
            lines = (
                self.spark.read.option("recursiveFileLookup", "true")
                .option("lineSep", "\n")
                .text(list(self.paths))
            )
            if with_file or placed:
                extra.append(sql.col("_metadata.file_block_start").alias("_from"))
            if not with_file and self.headers:  # to number lines, all have to be there
                bare = sql.rtrim("value", sql.lit("\r")).cast("binary")
                heads = [
                    sql.lit(header.encode(self.spec.input.encoding)) for header in self.headers
                ]
                lines = lines.where(~bare.isin(*heads))
            ended = sql.concat(sql.col("value"), sql.lit("\n"))
            return lines.select(ended.cast("binary").alias("line"), *extra)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turns what Spark says about paths that it cannot read into our words."""
        from pyspark.errors import AnalysisException

        try:
            yield
        except AnalysisException as error:
            if error.getCondition() == "PATH_NOT_FOUND":
                raise InputError(f"{self.named}: matches no file") from None
            raise InputError(
                f"{self.named}: cannot be read ({str(error).splitlines()[0]})"
            ) from None

    def _records(self, *extra: Column) -> DataFrame:
        """Reads CSV whose quoted fields may hold a line's end: a file is read whole, by one task. Bytes are passed on
        unchanged, for the workers to parse."""
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
        last = frame[
            names[-1]
        ]  # only a line feed ends a record: a carriage return before it is not part of a cell
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

    def _columns(self) -> DataFrame:
        """Reads Parquet, or the files that a Delta table's newest version holds."""
        from pyspark.sql import functions as sql

        source = self.spec.input
        if self.spec.input.format == "delta":
            files = [f for path in self.paths for f in files_of_delta(path)]
            if not files:
                raise InputError(f"{self.named}: holds no rows")
            reader = self.spark.read.option(
                "mergeSchema", "true"
            )  # older files may lack a newer column
            frame = (
                reader.option("basePath", self.paths[0]) if len(self.paths) == 1 else reader
            ).parquet(*files)
        else:
            schema = ", ".join(f"{_quoted(name)} {kind}" for name, kind in self._stored.items())
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
                    if name not in self._stored
                }
            )
        refuse_missing(self.named, frame.columns, source.columns)
        return frame

    @cached_property
    def _parquet_files(self) -> list[str]:
        with self._named():
            files = (
                self.spark.read.option("recursiveFileLookup", "true")
                .text(list(self.paths))
                .inputFiles()
            )
            refuse_tables(self.spark, files)  # listed as text, so that no footer is read before
        return sorted(str(file) for file in files)

    @cached_property
    def _stored(self) -> dict[str, str]:
        """The columns of Parquet files that the spec names, with a type that holds those of all files."""
        source = self.spec.input
        files = types_of(self.spark, self._parquet_files, source.columns)
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

    def _cells(self, frame: DataFrame) -> dict[str, Column]:
        """The input's columns, not cast yet; dates, times without a zone and times in nanoseconds as moments in UTC
        where numbers are wanted."""
        from pyspark.sql import functions as sql

        kinds, cells = dict(frame.dtypes), {}
        for name, kind in self.spec.input.read_as.items():
            cells[name] = frame[_quoted(name)]
            if kind in ("int", "float") and kinds[name] in ("date", "timestamp_ntz"):
                cells[name] = cells[name].cast("timestamp")
            if self.spec.input.format == "parquet" and self._stored.get(name) == NANOSECONDS:
                if kind not in ("int", "float"):
                    raise InputError(
                        f"{self.named}: column {name!r} holds times, which are not read as {kind}; read "
                        "them as float, seconds since 1970"
                    )
                cells[name] = sql.timestamp_micros(sql.expr(f"{_quoted(name)} div 1000"))
        return cells

    def _typed(self, frame: DataFrame, cells: Mapping[str, Column]) -> dict[str, Column]:
        """The cells in the spec's types, null where a value does not fit: a cast alone would cut a fraction off."""
        from pyspark.sql import functions as sql

        kinds, found = dict(frame.dtypes), {}
        for name, kind in self.spec.input.read_as.items():
            typed = cells[name].try_cast(SPARK_TYPES[kind])
            if (
                kind == "float" and kinds[name] == "string"
            ):  # Spark reads a number that is too large as an infinity
                typed = sql.when((sql.abs(typed) != math.inf) | cells[name].rlike(INFINITY), typed)
            fractions = kind == "int" and kinds[name].startswith(("float", "double", "decimal"))
            found[name] = sql.when(cells[name] % 1 == 0, typed) if fractions else typed
        return found

    def _bad(
        self, frame: DataFrame, cells: Mapping[str, Column], typed: Mapping[str, Column]
    ) -> Column:
        from pyspark.sql import functions as sql

        kinds = dict(frame.dtypes)
        bad = sql.lit(None).cast("string")
        for name, kind in reversed(list(self.spec.input.read_as.items())):
            if kinds[name] not in _SAFE.get(kind, (SPARK_TYPES[kind],)):
                lost = cells[name].isNotNull() & typed[name].isNull()
                bad = sql.when(lost, sql.lit(name)).otherwise(bad)
        return bad

    def check_headers(self) -> None:
        """Refuses a file whose header differs from the spec's columns, or a Parquet file with other columns; and one
        that is compressed and not whole."""
        source = self.spec.input
        dotted = next((name for name in source.columns if "." in name), None)
        if dotted and source.format in (
            "parquet",
            "delta",
        ):  # Spark would look for a part of a struct at each step
            raise InputError(
                f"{self.spec.name}: input column {dotted!r}: names with dots, as parts of structs have, "
                "are read by the local engine alone; run it with --engine local, or write the part as a "
                "column of its own"
            )
        if source.format == "parquet":
            _ = self._stored
        if source.format not in ("parquet", "delta"):
            files = self.read(with_file=True).inputFiles()
            refuse_cut(self.spark, files)
        if source.header:
            for path, line in _first_lines(self.spark, files, source.encoding):
                refuse_header(path, line, source)

    @cached_property
    def joins(self) -> dict[str, str]:
        """How each side table is joined."""
        return {join.path: joined_by(self.spark, join) for join in self.spec.rows.joins}

    @cached_property
    def parsed(self) -> DataFrame:
        """The input's good rows in cells, see `sluice.etl.spark.workers.parsed_rows`: they are parsed in the first
        pass."""
        if not self.spec.input.place:
            return parsed_cells(self.read(), self.spec, self.level)
        return parsed_cells(self.read(placed=True), self.spec, self.level, self.rows_before)

    @cached_property
    def rows_before(self) -> Before:
        """How many rows lie before each part of the input, and how many there are."""
        counted = self.read(placed=True).groupBy("_file", "_from").count().collect()
        return rows_before({(file, start): rows for file, start, rows in counted})

    @cached_property
    def frame(self) -> DataFrame:
        """What fitting and writing start from: cells, or, if rows must meet other rows, the good ones after that."""
        if not self.spec.rows.relational:
            return self.parsed
        kinds = [
            f"`{name}` {SPARK_TYPES[kind]}" for name, kind in self.spec.input.with_place.items()
        ]
        kinds += [f"{name} bigint" for name in TIES]
        typed = self.parsed.mapInArrow(partial(rows_with_ties, self.spec), ", ".join(kinds))
        check_orders(typed, self.spec)
        return relate(typed, self.spec, self.earlier).persist()

    def files_of(self, part: int) -> list[str]:
        """The files that a task of this number reads in the first pass."""
        partition = self.read()._jdf.queryExecution().toRdd().partitions()[part]
        return [str(file.toPath()) for file in partition.files()]

    def release(self) -> None:
        """Lets go of the rows that Spark holds for this input, if any. The executors have done so when it returns: a
        session that ends before they answer prints errors."""
        for name in {"parsed", "frame"} & self.__dict__.keys():
            getattr(self, name).unpersist(blocking=True)


def _quoted(name: str) -> str:
    """A column's name in Spark's SQL."""
    return f"`{name.replace('`', '``')}`"


def _first_lines(spark: SparkSession, files: list[str], encoding: str) -> Iterator[tuple[str, str]]:
    """The first line of each file, through Spark's own file systems and codecs, so that whatever Spark reads can be
    checked."""
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
            yield file, line.removeprefix("\ufeff")  # Spark skips a byte order mark there, too
        finally:
            reader.close()


def refuse_cut(spark: SparkSession, files: Iterable[str]) -> None:
    """Raises an InputError that names the first file which is not whole; reads through Spark's own file systems.

    Spark takes a .bz2 file that ends where one of its blocks does for whole, and a file that is not bzip2 at all for
    empty. It reads a .zst file of several frames up to the one that is cut short, so the heads of all blocks are looked
    at. A .gz file that is cut short makes its reader fail, as its checksum comes last."""
    looked_at = [file for file in files if file.endswith((".gz", ".bz2", ".zst"))]
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()

    def look(file: str) -> str | None:
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

    if looked_at:
        with ThreadPool(_READERS) as pool:
            refuse_faults(zip(looked_at, pool.imap(look, looked_at), strict=True))


def check_orders(frame: DataFrame, spec: Spec) -> None:
    """Checks, with Spark, each text column by which rows are put in order. The frame holds good rows as columns."""
    from pyspark.sql import functions as sql

    for key, name in _orders(spec):
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
            if (why := unsorted([(row["form"], row["least"]) for row in rows])) is not None:
                raise InputError(
                    f"{key} = {name!r}: holds text that does not sort as times do ({why}); nothing was "
                    "published; read the column as int or float, or write all its times alike, as in "
                    "2024-01-31 10:00:00"
                )


def _orders(spec: Spec) -> list[tuple[str, str]]:
    rows = spec.rows
    found = [("dedup.order", rows.dedup.order)] if rows.dedup and rows.dedup.order else []
    return [
        *found,
        *(
            ("lag.order" if history.lag else "history.order", history.order)
            for history in rows.histories
        ),
    ]


def unsorted(forms: Sequence[tuple[str, str]]) -> str | None:
    """Says why texts of these forms (each digit written as 0), each given with an example, do not sort as times do;
    None if they do: digits alone, or a date and a time as ISO 8601 has them, all of one length."""
    strange = next((example for form, example in forms if not _SORTS.fullmatch(form)), None)
    if strange is not None:
        return f"{strange[:100]!r} is no time"
    if len(forms) > 1:
        return " and ".join(repr(example) for _, example in forms[:2]) + " are not written alike"
    return None


def types_of(
    spark: SparkSession, files: Iterable[str], names: Collection[str]
) -> dict[str, Mapping[str, str]]:
    """Those of the columns that each file has, with their types as Spark has them; read through Spark's own file
    systems. InputError if Spark cannot read one. Spark would assume that all files have one file's columns, and read a
    column that another file lacks as nulls."""
    jvm: Any = spark._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    known: dict[str, Mapping[str, str]] = {}

    def schema_of(file: str) -> Any:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(
            jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, conf)
        )
        try:
            return reader.getFooter().getFileMetaData().getSchema()
        finally:
            reader.close()

    def type_of(file: str, column: Any) -> str:
        if "TIMESTAMP(NANOS," in (stored := str(column)):
            return NANOSECONDS
        parquet = jvm.org.apache.spark.sql.execution.datasources.parquet
        alone = jvm.org.apache.parquet.schema.MessageType("column", jvm.java.util.List.of(column))
        settings = spark._jsparkSession.sessionState().conf()
        try:
            fields = parquet.ParquetToSparkSchemaConverter(settings).convert(alone).fields()
        except Exception as error:  # py4j's own, which wraps Spark's
            better = (
                "run the job with `sluice etl --engine local`"
                if "FLOAT16" in stored
                else "write the column in another type, or leave it out of input.columns"
            )
            raise InputError(
                f"{file}: column {column.getName()!r} holds {stored}, which Spark does not read; {better}"
            ) from error
        return str(fields[0].dataType().simpleString())

    def described(file: str) -> tuple[str, Mapping[str, str]]:
        schema = schema_of(file)
        text = str(schema.toString())
        if text not in known:  # most often all files have the same schema
            known[text] = {
                column.getName(): type_of(file, column)
                for column in schema.getFields()
                if column.getName() in names
            }
        return file, known[text]

    with ThreadPool(_READERS) as pool:
        return dict(pool.imap(described, files))
