"""`LocalInput`: the files of a job's input, their checks, and the pieces for threads. `only_spark` returns why a job
needs Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import HEAD, TAIL, fault, refuse_faults, refuse_header
from sluice.etl.local.columns import RowGroups, check_columns, row_groups_of
from sluice.etl.local.input_paths import InputFile, files_of, store_of
from sluice.etl.local.pieces import PIECE_BYTES, Piece, first_line, pieces_of
from sluice.etl.local.threads import Threads
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.spec import Spec
from sluice.etl.table.foreign_tables import files_of_delta

_NUMBER = re.compile(r"[-+]?[\d.]+([eE][-+]?\d+)?")


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
        self._has_columns = source.format in ("parquet", "delta")
        self._constants: dict[str, dict[str, Any]] = {}
        if source.format == "delta":
            paths = tuple(file for path in paths for file in self._of_delta(path))
            if not paths:
                raise InputError(f"{self._named}: holds no rows")
        self._files = files_of(paths, by_log=source.format == "delta")
        self._groups: list[RowGroups] = []

    def _of_delta(self, path: str) -> list[str]:
        """Returns the files of a Delta table. Stores the values of partition columns, which only its log has."""
        from deltalake import DeltaTable

        found = files_of_delta(path)
        added = pa.table(DeltaTable(path).get_add_actions(flatten=True)).to_pylist()
        for file, one in zip(found, added, strict=True):
            values = {
                name[10:]: value for name, value in one.items() if name.startswith("partition.")
            }
            for name, value in values.items():
                if (
                    isinstance(value, str)
                    and name in self._source.columns
                    and _NUMBER.fullmatch(value)
                ):
                    raise InputError(
                        f"{path}: partition {name!r} holds {value!r}, a number as text, which the local "
                        "engine does not read as Spark does; run it with --engine spark"
                    )
            self._constants[store_of(file)[1]] = values
        return found

    @property
    def size(self) -> int:
        """The size of all pieces: rows of formats with columns, otherwise bytes."""
        return sum(group.size for group in self._groups) if self._has_columns else self.bytes

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self._files)

    def pieces(self) -> Iterator[Piece | RowGroups]:
        return iter(self._groups) if self._has_columns else pieces_of(self._files, PIECE_BYTES)

    def check(self) -> None:
        """Raises an InputError if a file has another header or other columns than the spec, or is compressed and
        damaged."""
        if self._has_columns:
            schemas = dict(
                zip(
                    [f.name for f in self._files],
                    self._threads.map(_schema, self._files),
                    strict=True,
                )
            )
            check_columns(
                self._named,
                schemas,
                self._source,
                [name for values in self._constants.values() for name in values],
            )
            self._groups = list(row_groups_of(self._files, self._source, self._constants))
            return
        packed = [file for file in self._files if file.name.endswith((".gz", ".bz2"))]
        refuse_faults(zip([f.name for f in packed], self._threads.map(_fault, packed), strict=True))
        first = partial(first_line, encoding=self._source.encoding)
        for file, line in zip(self._files, self._threads.map(first, self._files), strict=True):
            if self._source.header:
                refuse_header(file.name, line, self._source)


def _schema(file: InputFile) -> pa.Schema:
    try:
        return pq.read_schema(file.open())
    except pa.ArrowInvalid as error:
        raise InputError(f"{file.name}: cannot be read ({error})") from None


def _fault(file: InputFile) -> str | None:
    with file.open() as stream:
        head = stream.read(min(file.size, HEAD))
        stream.seek(max(0, file.size - TAIL))
        return fault(file.name, head, stream.read(TAIL))
