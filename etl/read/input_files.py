"""`InputFiles`: the files of a job's input, or of a side table, that Arrow reads; their checks, and their pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from multiprocessing.pool import ThreadPool
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import refuse_header
from sluice.etl.read.input_paths import InputFile, files_of, files_of_tables
from sluice.etl.read.pieces import (
    PIECE_BYTES,
    UNREAD,
    FileRange,
    Piece,
    first_line,
    pack,
    pieces_of,
    split_into_tasks,
)
from sluice.etl.read.row_groups import RowGroups, check_columns, row_groups_of
from sluice.etl.spec.input_section import Input
from sluice.etl.table.table_columns import OWN, FileColumns, partitions_of, refuse_twice
from sluice.etl.table.table_files import TableFiles

TaskInput = tuple[FileRange | RowGroups, ...]
"""What one task reads of the input."""
_READERS = 8


def _in_threads(function: Callable[[InputFile], Any], files: Sequence[InputFile]) -> list[Any]:
    with ThreadPool(_READERS) as pool:
        return pool.map(function, files)


class InputFiles:
    """The files that paths name, or those of tables."""

    def __init__(self, source: Input, paths: Sequence[str]) -> None:
        self._source = source
        self.named = ", ".join(paths)
        if source.is_table:
            self._located = files_of_tables([TableFiles.open(path) for path in paths])
            if not self._located:
                raise InputError(f"{self.named}: holds no rows")
        else:
            self._located = dict.fromkeys(files_of(paths), OWN)
        self.files = list(self._located)
        self._records = source.delimiter if source.multiline else ""

    @cached_property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    def pieces(self) -> Iterator[Piece | RowGroups]:
        """Yields all of the input in pieces for threads."""
        return (
            iter(self.row_groups)
            if self._source.has_columns
            else pieces_of(self.files, PIECE_BYTES, self._records)
        )

    def tasks(self, task_bytes: int) -> Sequence[TaskInput]:
        """Returns all of the input in order, in parts of about `task_bytes`."""
        if self._source.has_columns:
            return pack(self.row_groups, task_bytes)
        return split_into_tasks(self.files, task_bytes, self._records)

    def check(self) -> None:
        """Raises an InputError if a file has another header or other columns than the spec."""
        source = self._source
        if source.has_columns:
            check_columns(self.named, self.schemas, source)
            return
        for file in self.files:
            if file.path.endswith(UNREAD):
                raise InputError(
                    f"{file.name}: is compressed in a way that is not read; compress it as .gz, .bz2 or .zst"
                )
        if source.header:
            lines = _in_threads(partial(first_line, encoding=source.encoding), self.files)
            for file, line in zip(self.files, lines, strict=True):
                refuse_header(file.name, line, source)

    @cached_property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """The columns of each file, by its name."""
        return {
            file.name: columns.schema(schema)
            for (file, columns), (schema, _) in zip(
                self._columns.items(), self._footers, strict=True
            )
        }

    @cached_property
    def row_groups(self) -> list[RowGroups]:
        return [
            group
            for (file, columns), (_, rows) in zip(self._columns.items(), self._footers, strict=True)
            for group in row_groups_of(file, columns, rows, self._source)
        ]

    @cached_property
    def _footers(self) -> list[tuple[pa.Schema, list[int]]]:
        return _in_threads(_read_footer, self.files)

    @cached_property
    def _columns(self) -> Mapping[InputFile, FileColumns]:
        """Where each file has its columns. The names of folders have further columns."""
        if self._source.is_table:
            return self._located
        column_of, kinds = self._source.column_of, self._source.read_as
        texts = [name for name, column in column_of.items() if kinds[column] == "text"]
        named = partitions_of([file.path for file in self.files], texts)
        for file, (schema, _), columns in zip(self.files, self._footers, named, strict=True):
            refuse_twice(file.name, [name for name in schema.names if name in column_of], columns)
        return {
            file: columns.of(column_of) for file, columns in zip(self.files, named, strict=True)
        }


def pieces_of_task(parts: TaskInput) -> Iterator[Piece | RowGroups]:
    for part in parts:
        yield from part.pieces()


def _read_footer(file: InputFile) -> tuple[pa.Schema, list[int]]:
    """Returns the columns of a Parquet file, and the number of rows of each row group."""
    try:
        with file.open() as stream, pq.ParquetFile(stream) as opened:
            footer = opened.metadata
            rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            return opened.schema_arrow, rows
    except pa.ArrowInvalid as error:
        raise InputError(f"{file.name}: cannot be read ({error})") from None
