"""Makes the packed copy of a version after its job, so that it exists when the first reader comes: `packing`.
`forget_copies` removes the copies of a Parquet file that will be removed.

It is a part of a program, so it may import every package: the copy belongs to the loader.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import UsageError
from sluice.etl.spec.nested_columns import flattened, parts
from sluice.etl.table.table import FeatureTable
from sluice.ingest.columns import Columns
from sluice.ingest.knobs import parse_bytes
from sluice.ingest.read.cache import forget
from sluice.ingest.read.open_file import LocalFile, local_path
from sluice.ingest.read.packed_copy import FOLDER, PackedCopy, PackedRowGroups, entry_name


def packing(limit: str, say: Callable[[str], None]) -> Callable[[str, int], dict[str, int]]:
    """Returns a function that makes the packed copies of a table's version and returns their report for the program's
    last line. It reports what it cannot do. The version exists already."""
    how = PackedCopy(limit_bytes=parse_bytes(limit))

    def pack(uri: str, version: int) -> dict[str, int]:
        table = FeatureTable.open(uri, version)
        try:
            columns = Columns.of(table.fields).names
        except UsageError as error:
            say(f"note: there is no packed copy of a table that cannot be loaded: {error}")
            return {"packed_bytes": 0}
        return {
            "packed_bytes": sum(_packed_bytes(table, split, columns, how) for split in table.splits)
        }

    return pack


def _packed_bytes(
    table: FeatureTable, split: str, columns: tuple[str, ...], how: PackedCopy
) -> int:
    """Makes the copies of a split, as its first reader would, and returns their bytes on disk."""
    files = table.files_of(split)
    paths = [local_path(file.path) for file in files]
    there = parts(pq.read_schema(paths[0])) if paths and paths[0] is not None else ()
    texts = {part.name for part in there if pa.types.is_string(part.type)}
    # The dictionaries are for operators that are left to the loader.
    dictionaries = [name for name in columns if name in texts]
    groups = PackedRowGroups(how, paths, columns, dictionaries)

    def decoded(number: int, group: int) -> pa.Table:
        wanted, file = (
            groups.find_entry(number, group),
            LocalFile(str(paths[number]), None, dictionaries),
        )
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


def forget_copies(path: str, table: str) -> int:
    """Removes the packed copies of a Parquet file that will be removed, next to the table's files in that folder.
    Returns their bytes."""
    status = os.stat(path, follow_symlinks=False)
    try:
        groups = range(pq.read_metadata(path).num_row_groups)
    except (OSError, pa.ArrowException):
        return 0  # nobody can have made a copy of what cannot be read

    def keys(data_set: str) -> list[str]:
        try:
            columns, states = ast.literal_eval(data_set)
            if (status.st_size, status.st_mtime_ns) not in states:
                return []
        except (ValueError, SyntaxError, TypeError):
            return []  # it is no data set of packed copies
        name = entry_name(path, status.st_size, status.st_mtime_ns, columns)
        return [f"{name} {group}" for group in groups]

    return sum(
        forget(above / FOLDER, keys) for above in Path(path).parents if above.is_relative_to(table)
    )
