"""The columns of a table in one of its Parquet files: `FileColumns`, and `TableParquet`, which reads them.

A column may have another name in the file, or one value for the whole file: a partition's, or null if the table got the
column after the file was written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.common.stores import Place

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)
_INTEGER = re.compile(r"-?\d{1,18}")
_NULL = "__HIVE_DEFAULT_PARTITION__"


class PartitionError(InputError):
    """Names of folders that cannot be read as columns."""


@dataclass(frozen=True)
class FileColumns:
    """Where a file has the columns of its table."""

    constants: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The columns with one value for the whole file."""
    names: Mapping[str, str] | None = None
    """The name in the file of each other column. None: the file's own names, and all of its columns."""

    @property
    def is_own(self) -> bool:
        """Whether the table has just the file's columns."""
        return self.names is None and not self.constants

    @property
    def described(self) -> list[Any]:
        """Everything that the columns' values depend on, for hashes."""
        return [
            {name: str(value) for name, value in self.constants.items()},
            None if self.names is None else dict(self.names),
        ]

    @property
    def renames(self) -> bool:
        """Whether a column has another name in the file."""
        return any(name != own for name, own in (self.names or {}).items())

    def of(self, wanted: Collection[str]) -> FileColumns:
        """Returns these columns without the constants that nobody wants."""
        constants = {name: value for name, value in self.constants.items() if name in wanted}
        return FileColumns(constants, self.names)

    def schema(self, stored: pa.Schema) -> pa.Schema:
        """Returns the schema of all columns, for the file's own schema."""
        if self.names is not None:
            stored = pa.schema(
                [stored.field(own).with_name(name) for name, own in self.names.items()]
            )
        return pa.schema([*stored, *((name, value.type) for name, value in self.constants.items())])

    def stored(self, wanted: Iterable[str]) -> list[str]:
        """Returns the names in the file of those wanted columns that it holds."""
        known = [name for name in wanted if name not in self.constants]
        return known if self.names is None else [_part(self.names, name) for name in known]

    def named(self, stored: Iterable[str]) -> list[str]:
        """Returns the table's names of the file's columns, or of parts of them. Empty for a column that the table
        lacks."""
        if self.names is None:
            return list(stored)
        own = {stored: name for name, stored in self.names.items()}
        return [_part(own, name) for name in stored]

    def table(self, rows: Rows, wanted: Sequence[str]) -> Rows:
        """Returns the wanted columns, for rows that were read by `stored`."""
        if self.is_own:
            return rows
        if self.names is not None:
            rows = rows.rename_columns(self.named(rows.schema.names))
        return self.with_constants(rows, wanted)

    def with_constants(self, rows: Rows, wanted: Iterable[str]) -> Rows:
        """Adds those wanted columns that have one value for the whole file."""
        for name in wanted if self.constants else ():
            if (value := self.constants.get(name)) is not None:
                values = pa.repeat(value, rows.num_rows)
                rows = rows.append_column(pa.field(name, value.type), values)
        return rows


OWN = FileColumns()
"""The columns of a file that no table describes."""


class TableParquet:
    """An open Parquet file with the columns of its table. Use it in a `with` block."""

    def __init__(self, file: str | pa.NativeFile, columns: FileColumns = OWN) -> None:
        in_store = isinstance(file, str) and "://" in file
        self._opened = Place.of(file).open() if in_store else None
        self._file = pq.ParquetFile(
            file if self._opened is None else self._opened, page_checksum_verification=True
        )
        self._columns = columns
        self.metadata = self._file.metadata
        self.num_row_groups = self._file.num_row_groups
        self.schema_arrow = columns.schema(self._file.schema_arrow)

    def __enter__(self) -> TableParquet:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        if self._opened is not None:
            self._opened.close()

    @property
    def constants(self) -> Mapping[str, pa.Scalar]:
        return self._columns.constants

    @property
    def leaves(self) -> list[str]:
        """The dotted path of each stored column of values, under the table's names. Empty if the table lacks it."""
        schema = self._file.schema
        return self._columns.named(schema.column(number).path for number in range(len(schema)))

    def read_row_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        stored = self._columns.stored(columns)
        rows = self._file.read_row_group(group, columns=stored, use_threads=False)
        return self._columns.table(rows, columns)

    def iter_batches(
        self, rows: int, groups: Sequence[int], columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        stored = self._columns.stored(columns)
        for batch in self._file.iter_batches(rows, list(groups), stored, use_threads=False):
            yield self._columns.table(batch, columns)


def _part(names: Mapping[str, str], name: str) -> str:
    """Translates a column's name, or the dotted name of a part of a struct. Returns nothing for an unknown column."""
    if name in names:
        return names[name]
    top, dot, part = name.partition(".")
    return f"{names[top]}{dot}{part}" if top in names else ""


def partitions_of(paths: Sequence[str], texts: Collection[str] = ()) -> list[FileColumns]:
    """Returns the columns that the folders right above each file name, as in `day=2026-01-01/hour=7/part.parquet`.

    A column is an int64 if each folder has a whole number, otherwise a string. Columns in `texts` are strings. Leaves
    out a column that the folders of some file do not name."""
    folders = [folders_of(path) for path in paths]
    common = [
        name
        for name in (folders[0] if folders else ())
        if all(name in folder for folder in folders)
    ]
    kinds = {
        name: pa.int64()
        if name not in texts
        and all(folder[name] is None or _INTEGER.fullmatch(str(folder[name])) for folder in folders)
        else pa.string()
        for name in common
    }
    return [
        FileColumns(
            {name: pa.scalar(folder[name], pa.string()).cast(kind) for name, kind in kinds.items()}
        )
        for folder in folders
    ]


def refuse_twice(path: str, names: Iterable[str], columns: FileColumns) -> None:
    """Raises a PartitionError if a file holds a column that the names of its folders have, too."""
    for name in names:
        if columns.names is None and name in columns.constants:
            raise PartitionError(
                f"{path}: column {name!r} is in the file and in the name of its folder "
                f"({name}={columns.constants[name]}); rename one of them"
            )


def folders_of(path: str) -> dict[str, str | None]:
    """Returns the names and values of the folders right above a file. A folder without them ends the search."""
    folders: dict[str, str | None] = {}
    for folder in reversed(path.split("/")[:-1]):
        name, mark, text = folder.partition("=")
        if not (mark and name):
            break
        if unquote(name) in folders:
            raise PartitionError(
                f"{path}: two of its folders name the column {unquote(name)!r}; rename one of them"
            )
        folders[unquote(name)] = None if text == _NULL else unquote(text)
    return dict(reversed(folders.items()))
