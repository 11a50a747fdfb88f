"""`LocalInput`: the files of a job's input, their checks, and the pieces for threads. `only_spark` returns why a job
needs Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.etl.local.columns import RowGroups, check_columns, row_groups_of
from sluice.etl.local.threads import Threads
from sluice.etl.read.input_paths import InputFile, files_of, files_of_tables
from sluice.etl.read.pieces import PIECE_BYTES, Piece, pieces_of
from sluice.etl.read.text_checks import check_text
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table_columns import OWN, partitions_of, refuse_twice
from sluice.etl.table.table_files import TableFiles


def only_spark(spec: Spec) -> str | None:
    """Returns why only Spark can do a job of this spec. None: the local engine can, too."""
    found = [
        *(["[dedup]"] if spec.rows.dedup else []),
        *(["[[join]]"] if spec.rows.joins else []),
        *dict.fromkeys("[[lag]]" if h.lag else "[[history]]" for h in spec.rows.histories),
    ]
    if found:
        return f"{' and '.join(found)} of {spec.name}: rows meet other rows there, which only Spark brings together"
    if spec.input.multiline:
        return f"input.multiline of {spec.name}: records over several lines are read by Spark alone"
    return None


class LocalInput:
    """The input of a job on this machine."""

    def __init__(self, source: Input, paths: tuple[str, ...], threads: Threads) -> None:
        self._source = source
        self._threads = threads
        self._named = ", ".join(paths)
        if source.is_table:
            self._located = files_of_tables([TableFiles.open(path) for path in paths])
            if not self._located:
                raise InputError(f"{self._named}: holds no rows")
        else:
            self._located = dict.fromkeys(files_of(paths), OWN)
        self._files = list(self._located)
        self._groups: list[RowGroups] = []

    @property
    def size(self) -> int:
        """The size of all pieces: rows of formats with columns, otherwise bytes."""
        return sum(group.size for group in self._groups) if self._source.has_columns else self.bytes

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self._files)

    def pieces(self) -> Iterator[Piece | RowGroups]:
        return (
            iter(self._groups) if self._source.has_columns else pieces_of(self._files, PIECE_BYTES)
        )

    def check(self) -> None:
        """Raises an InputError if a file has another header or other columns than the spec, or is compressed and
        damaged."""
        if self._source.has_columns:
            stored = list(self._threads.map(_schema, self._files))
            if not self._source.is_table:
                # The names of folders have further columns.
                kinds = self._source.read_as
                texts = [name for name, kind in kinds.items() if kind == "text"]
                named = partitions_of([file.path for file in self._files], texts)
                for file, schema, one in zip(self._files, stored, named, strict=True):
                    refuse_twice(file.name, [name for name in schema.names if name in kinds], one)
                    self._located[file] = one.of(kinds)
            schemas = {
                file.name: located.schema(schema)
                for (file, located), schema in zip(self._located.items(), stored, strict=True)
            }
            check_columns(self._named, schemas, self._source)
            self._groups = list(row_groups_of(self._located, self._source))
            return
        check_text(self._files, self._source, self._threads.map)


def _schema(file: InputFile) -> pa.Schema:
    try:
        return pq.read_schema(file.open())
    except pa.ArrowInvalid as error:
        raise InputError(f"{file.name}: cannot be read ({error})") from None
