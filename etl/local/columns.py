"""`RowGroups`: a piece of Parquet, or of a table, for a thread. `check_columns` checks the columns of all files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.cells import stored_cells
from sluice.etl.apply.input_checks import refuse_differences, refuse_missing
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.read.input_paths import InputFile
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.input_values import converted, spark_name
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
    """The number of rows."""
    source: Input
    located: FileColumns
    """Where the file has the columns."""

    def batches(self, _headers: tuple[bytes, ...]) -> Iterator[pa.RecordBatch]:
        """Yields the spec's columns, and `_bad`, the name of the first column that does not fit its type."""
        with self.file.open() as stream, TableParquet(stream, self.located) as reader:
            names = {part.name for part in parts(reader.schema_arrow)}
            there = [name for name in self.source.columns if name in names]
            width = sum(reader.metadata.row_group(g).total_byte_size for g in self.groups) // max(
                1, self.size
            )
            rows = max(1024, min(_PIECE_ROWS, _BATCH_BYTES // max(1, width)))
            try:
                for batch in reader.iter_batches(rows, self.groups, there):
                    yield stored_cells(flattened(batch), self.source)
            except (pa.ArrowException, OSError) as error:
                if getattr(error, "errno", None):  # a fault of the machine
                    raise
                raise JobFailure(
                    f"{self.file.name}: row groups {self.groups[0]} to {self.groups[-1]} cannot be read "
                    f"({error}): the file is damaged, or in a form that this Arrow does not know; "
                    "nothing was published; write the file again"
                ) from error


def row_groups_of(files: Mapping[InputFile, FileColumns], source: Input) -> Iterator[RowGroups]:
    for file, located in files.items():
        with file.open() as stream, TableParquet(stream) as reader:
            footer = reader.metadata
        rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        step = max(1, _PIECE_ROWS // max([1, *rows]))
        for first in range(0, len(rows), step):
            groups = range(first, min(first + step, len(rows)))
            yield RowGroups(
                file,
                first,
                tuple(groups),
                sum(rows[g] for g in groups),
                source,
                located,
            )


def check_columns(named: str, schemas: Mapping[str, pa.Schema], source: Input) -> None:
    """Raises an InputError if the columns of the files differ, are not those of the spec, or cannot be converted."""
    stored = {
        file: {part.name: part.type for part in parts(schema)} for file, schema in schemas.items()
    }
    types = {
        file: {name: spark_name(kind) for name, kind in kinds.items()}
        for file, kinds in stored.items()
    }
    everywhere = dict.fromkeys(name for found in types.values() for name in found)
    if source.format == "parquet":
        refuse_differences(types, source.read_as, source.optional)
    refuse_missing(
        named, everywhere, [name for name in source.columns if name not in source.optional]
    )
    for file in schemas:
        for name in source.columns.keys() & types[file].keys():
            kind = source.read_as[name]
            try:
                converted(pa.array([], stored[file][name]), kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                have = stored[file][name]
                unread = pa.types.is_time(have) or pa.types.is_duration(have)
                better = (
                    "write the column in another type, or leave it out of input.columns"
                    if unread
                    else "run it with --engine spark"
                )
                raise InputError(
                    f"{file}: column {name!r} holds {types[file][name]}, which the local engine does not "
                    f"read as {kind}; {better}"
                ) from None
