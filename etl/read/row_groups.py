"""`RowGroups`: a piece of Parquet, or of a table. `check_columns` checks the columns of all files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.cells import stored_cells, stored_column
from sluice.etl.apply.input_checks import Part, refuse_lacking, refuse_missing
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.read.input_paths import InputFile
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.nested_columns import flattened, parts
from sluice.etl.table.table_columns import FileColumns, TableParquet

_PIECE_ROWS, _BATCH_BYTES = 1 << 17, 64 << 20


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Some row groups of a Parquet file."""

    file: InputFile
    number: int
    """The number of the first row group."""
    groups: tuple[int, ...]
    size: int
    """About how many bytes of the file they take."""
    source: Input
    located: FileColumns
    """Where the file has the columns."""

    @property
    def part(self) -> Part:
        return self.file.name_in_rejects, self.number

    def pieces(self) -> Iterator[RowGroups]:
        """Yields this piece, as a `FileRange` yields its pieces."""
        yield self

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the spec's columns, and `_bad`, the name of the first column that does not fit its type."""
        for batch in self.stored(self.source.column_of):
            yield stored_cells(batch, self.source)

    def stored(self, wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
        """Yields those wanted columns that the file has, in the types that it has."""
        with self.file.open() as stream, TableParquet(stream, self.located) as reader:
            names = {part.name for part in parts(reader.schema_arrow)}
            there = [name for name in wanted if name in names]
            groups = [reader.metadata.row_group(number) for number in self.groups]
            width = sum(group.total_byte_size for group in groups) // max(
                1, sum(group.num_rows for group in groups)
            )
            rows = max(1024, min(_PIECE_ROWS, _BATCH_BYTES // max(1, width)))
            try:
                for batch in reader.iter_batches(rows, self.groups, there):
                    yield flattened(batch)
            except (pa.ArrowException, OSError) as error:
                if getattr(error, "errno", None):  # a fault of the machine
                    raise
                raise JobFailure(
                    f"{self.file.name}: row groups {self.groups[0]} to {self.groups[-1]} cannot be read "
                    f"({error}): the file is damaged, or in a form that this Arrow does not know; "
                    "nothing was published; write the file again"
                ) from error


def row_groups_of(
    file: InputFile, located: FileColumns, rows: Sequence[int], source: Input
) -> Iterator[RowGroups]:
    """Yields the pieces of a file whose row groups have so many `rows`."""
    step = max(1, _PIECE_ROWS // max([1, *rows]))
    for first in range(0, len(rows), step):
        size = file.size * sum(rows[first : first + step]) // max(1, sum(rows))
        groups = tuple(range(first, min(first + step, len(rows))))
        yield RowGroups(file, first, groups, size, source, located)


def check_columns(named: str, schemas: Mapping[str, pa.Schema], source: Input) -> None:
    """Raises an InputError if files lack columns of the spec, or columns cannot be converted."""
    stored = {
        file: {part.name: part.type for part in parts(schema)} for file, schema in schemas.items()
    }
    column_of = source.column_of
    known = {
        file: dict.fromkeys(column_of.get(name, name) for name in kinds)
        for file, kinds in stored.items()
    }
    everywhere = dict.fromkeys(name for names in known.values() for name in names)
    if source.format == "parquet":
        refuse_lacking(known, source.columns, source.optional)
    refuse_missing(
        named, everywhere, [name for name in source.columns if name not in source.optional]
    )
    for file, kinds in stored.items():
        for name in column_of.keys() & kinds.keys():
            kind, have = source.read_as[column_of[name]], kinds[name]
            try:
                stored_column(pa.array([], have), kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                better = "write the column in another type, or leave it out of input.columns"
                if pa.types.is_floating(have):
                    better = (
                        "such numbers have no exact text (17 becomes 17.0): declare it, and the column that a join "
                        "compares it with, as int or float, or write it as text"
                    )
                elif pa.types.is_timestamp(have):
                    better = "read times as float, seconds since 1970"
                raise InputError(
                    f"{file}: column {name!r} holds {have}, which is not read as {kind}; {better}"
                ) from None
