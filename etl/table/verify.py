"""`verify` looks for damage: it compares a version's files with its job records, byte for byte and id for id."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.schema import DataFile, Field
from sluice.etl.table.store import TableStore


def verify(
    store: TableStore,
    files: Sequence[DataFile],
    fields: Sequence[Field],
    schema: pa.Schema,
    *,
    listed: set[str],
) -> list[str]:
    """Returns problems, one line each. `listed` are the files of every version.

    Other files in `data/` are orphans, except hidden files of other programs."""
    problems = [p for f in files for p in _of_file(store, f, fields, schema)]
    orphans = [
        p
        for p in store.files("data")
        if p not in listed and not any(part.startswith(("_", ".")) for part in p.split("/"))
    ]
    return problems + [
        f"{store.url(p)}: an orphan: no version holds it (it is never read; a stopped job left it)"
        for p in orphans
    ]


def _of_file(
    store: TableStore, file: DataFile, fields: Sequence[Field], schema: pa.Schema
) -> list[str]:
    relative = store.relative(file.path)
    size = store.size(relative)
    if size is None:
        return [f"{file.path}: missing"]
    if size != file.bytes:
        return [
            f"{file.path}: {size} bytes, but {file.bytes} were published (truncated or replaced)"
        ]
    try:
        problems = _of_content(relative, store, file, fields, schema)
    except (OSError, pa.ArrowException) as error:
        return [f"{file.path}: damaged ({str(error).splitlines()[0]})"]
    if store.digest(relative) != file.content:
        problems.insert(
            0, f"{file.path}: its bytes are not those published (a flipped bit, or replaced)"
        )
    return problems


def _of_content(
    path: str, store: TableStore, file: DataFile, fields: Sequence[Field], schema: pa.Schema
) -> list[str]:
    problems = []
    with store.parquet(path) as reader:
        groups = tuple(
            reader.metadata.row_group(i).num_rows for i in range(reader.metadata.num_row_groups)
        )
        if groups != file.row_group_rows:
            problems.append(
                f"{file.path}: row groups of {groups} rows, but {file.row_group_rows} were published"
            )
        have = {f.name: f.type for f in reader.schema_arrow}
        for f in schema:
            if have.get(f.name) != f.type:
                problems.append(
                    f"{file.path}: column {f.name!r} is {have.get(f.name, 'missing')}, not {f.type}"
                )
        if problems:
            return problems
        for number in range(len(groups)):
            batch = reader.read_row_group(number, columns=schema.names, use_threads=False)
            problems += [f"{file.path}, row group {number}: {p}" for p in _of_rows(batch, fields)]
    return problems


def _of_rows(batch: pa.Table, fields: Sequence[Field]) -> list[str]:
    problems = []
    for f in fields:
        column = batch[f.name]
        if column.null_count and not f.nullable:
            problems.append(f"column {f.name!r} has {column.null_count} nulls")
        if f.layout != "scalar" or not len(column) or pa.types.is_string(column.type):
            continue
        bounds = pc.min_max(column).as_py()
        low, high = bounds["min"], bounds["max"]
        if f.cardinality is not None and not f.online and (low < 0 or high >= f.cardinality):
            problems.append(
                f"column {f.name!r}: ids from {low} to {high}, but its embedding has {f.cardinality} rows"
            )
        if f.role == "label" and f.type == "int8" and (low < 0 or high > 1):
            problems.append(f"column {f.name!r}: labels from {low} to {high}, not 0 and 1")
        if (
            f.role in ("dense", "weight")
            and not f.nullable
            and not pc.all(pc.is_finite(column)).as_py()
        ):
            problems.append(f"column {f.name!r} has values that are not finite")
    return problems
