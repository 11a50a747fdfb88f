"""The packed copy of a version that a job has made, which is there when the first reader comes: `packing`.

It is a part of the program, and as such may use every room: the copy is the loader's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from sluice.etl.common.errors import UsageError
from sluice.etl.spec.nested_columns import flattened
from sluice.etl.table.table import FeatureTable
from sluice.ingest.columns import Columns
from sluice.ingest.knobs import parse_bytes
from sluice.ingest.read.open_file import LocalFile, local_path
from sluice.ingest.read.packed_copy import PackedCopy, PackedRowGroups


def packing(limit: str, say: Callable[[str], None]) -> Callable[[str, int], dict[str, int]]:
    """A function that makes the packed copies of a table's version, and returns what the program's last line says of
    them. What it cannot do it says; the version is there already."""
    how = PackedCopy(limit_bytes=parse_bytes(limit))

    def pack(uri: str, version: int) -> dict[str, int]:
        table = FeatureTable.open(uri, version)
        if any(field.online for field in table.fields):
            say("note: this table leaves operators to the loader, so whoever reads it first makes its packed copy")
            return {"packed_bytes": 0}
        try:
            columns = Columns.of(table.fields).names
        except UsageError as error:
            say(f"note: there is no packed copy of a table that cannot be loaded: {error}")
            return {"packed_bytes": 0}
        return {"packed_bytes": sum(_packed_bytes(table, split, columns, how) for split in table.splits)}

    return pack


def _packed_bytes(table: FeatureTable, split: str, columns: tuple[str, ...], how: PackedCopy) -> int:
    """Makes the copies of a split, as its first reader would, and returns their bytes on disk."""
    files = table.files_of(split)
    paths = [local_path(file.path) for file in files]
    groups = PackedRowGroups(how, paths, columns, ())

    def decoded(number: int, group: int) -> pa.Table:
        wanted, file = groups.wanted(number, group), LocalFile(str(paths[number]), None, ())
        try:
            rows: Any = flattened(file.read(group, columns))
            if wanted is not None:
                groups.keep(wanted, file, rows)
            return rows
        finally:
            file.close()

    groups.make(decoded, [file.row_group_rows for file in files])
    made = groups.stats().get("packed_bytes", 0)
    groups.close()
    return made
