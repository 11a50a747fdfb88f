"""The files of one version of a Delta or an Iceberg table, of any program: `TableFiles`.

The table's own metadata names the files. No folder is listed. A version that only marks deleted rows is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.common.stores import Place, plain_path
from sluice.etl.table.table_columns import FileColumns

if TYPE_CHECKING:
    from pyiceberg.table import Table

_VERSIONED = re.compile(r"(.+)@v(\d+)(\?.*)?", re.DOTALL)
_CATALOG = re.compile(r"iceberg://([^/]+)/(.+)")
_READERS = 16
_ID = b"PARQUET:field_id"
_PARTITION = "partition."
_SMALL = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
"""Arrow's types as its Parquet reader makes them."""
_STRUCT = "a struct, whose parts may have other names in the table's files"
_REWRITE = "let the table's engine rewrite its data files (Spark: CALL system.rewrite_data_files)"


class TableFilesError(InputError):
    """A table, or a version of it, that cannot be read exactly. The message names the table and what to do."""


@dataclass(frozen=True)
class TableFiles:
    """One fixed version. Later commits do not change this object."""

    uri: str
    kind: str
    """`delta` or `iceberg`."""
    version: int
    """The version of a Delta table, or the id of a snapshot of an Iceberg table."""
    schema: pa.Schema
    """The columns of the table that can be read."""
    files: Mapping[str, Mapping[str, pa.Scalar]]
    """The absolute path or URI of each file, sorted, with the values of its partition columns."""
    stored: Mapping[str, str | int]
    """For each column, its name or its field id in the files."""
    unread: Mapping[str, str]
    """The other columns of the table, each with the reason why it cannot be read."""
    added: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The value of a column in files that lack it. Null for a column that is not here."""

    @classmethod
    def open(cls, named: str, version: int | None = None) -> TableFiles:
        """Opens a version, by default the newest. `named` may end in its version: `TABLE@v3`.

        It is the folder of a Delta table, the metadata file of an Iceberg table, or
        `iceberg://CATALOG/NAMESPACE.TABLE`."""
        uri, version = versioned(named, version)
        return (_open_iceberg if is_iceberg(uri) else _open_delta)(uri, version)

    @property
    def name(self) -> str:
        """The table with its version, as `open` takes it."""
        base, mark, query = self.uri.partition("?")
        return f"{base}@v{self.version}{mark}{query}"

    @cached_property
    def columns(self) -> Mapping[str, FileColumns]:
        """For each file, where it has the table's columns. Reads all footers."""
        with ThreadPool(_READERS) as pool:
            schemas = pool.map(_schema_of, self.files)
        return {
            path: self._columns_in(path, schema, partition)
            for (path, partition), schema in zip(self.files.items(), schemas, strict=True)
        }

    def _columns_in(
        self, path: str, schema: pa.Schema, partition: Mapping[str, pa.Scalar]
    ) -> FileColumns:
        ids = {int(f.metadata[_ID]): f.name for f in schema if _ID in (f.metadata or {})}
        names: dict[str, str] = {}
        constants: dict[str, pa.Scalar] = {}
        for column in self.schema:
            own = self.stored[column.name]
            if isinstance(own, int) and not ids and column.name not in partition:
                raise TableFilesError(
                    f"{path}: its columns have no ids, by which the table {self.uri} finds them; {_REWRITE}"
                )
            name = ids.get(own) if isinstance(own, int) else own
            # A file's own values count before those of the table's metadata.
            if name in schema.names:
                names[column.name] = str(name)
            else:
                null = pa.scalar(None, column.type)
                constants[column.name] = partition.get(
                    column.name, self.added.get(column.name, null)
                )
        return FileColumns(constants, names)


def versioned(named: str, version: int | None = None) -> tuple[str, int | None]:
    """Splits `TABLE@v3` into the table and its version. A file or folder of this very name counts as the name."""
    match = _VERSIONED.fullmatch(named)
    if match is None or os.path.exists(named):
        return named, version
    written = int(match[2])
    if version not in (None, written):
        raise TableFilesError(f"{named}: this names version {written}, and version={version}")
    return match[1] + (match[3] or ""), written


def is_iceberg(uri: str) -> bool:
    return uri.partition("?")[0].endswith(".metadata.json") or uri.startswith("iceberg://")


def is_delta(path: str) -> bool:
    """Whether a local folder holds a Delta table."""
    return os.path.isdir(os.path.join(plain_path(path), "_delta_log"))


def _schema_of(path: str) -> pa.Schema:
    try:
        with Place.of(path).open() as file:
            return pq.read_schema(file)
    except FileNotFoundError:
        raise TableFilesError(
            f"{path}: the table names this file, and it is gone; was its version vacuumed? Name another one"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise TableFilesError(f"{path}: cannot be read ({first_line(error)})") from None


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def one_line(error: Exception) -> str:
    """Returns a text of delta-rs in one line. If a store fails, delta-rs writes several lines with colours."""
    return " ".join(re.sub(r"\x1b\[\d+m|↳", "", str(error)).split())


def _structs(schema: pa.Schema) -> dict[str, str]:
    """Returns the columns with structs or maps in them, and why they are not read."""
    lists = (pa.types.is_list, pa.types.is_large_list)
    return {
        f.name: _STRUCT
        for f in schema
        if pa.types.is_nested(f.type)
        and not (
            any(is_kind(f.type) for is_kind in lists) and not pa.types.is_nested(f.type.value_type)
        )
    }


# ---- Delta


def _open_delta(uri: str, version: int | None) -> TableFiles:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    place = Place.of(uri)
    try:
        table = DeltaTable(**place.delta, version=version)
        deleted = pa.table(table.deletion_vectors())["filepath"].to_pylist()
        adds = pa.table(table.get_add_actions(flatten=True))
        described = json.loads(table.schema().to_json())["fields"]
    except DeltaError as error:
        if version is not None and version > (newest := _open_delta(uri, None).version):
            raise TableFilesError(
                f"{uri}: there is no version {version}: the newest is {newest}"
            ) from None
        what = uri if version is None else f"{uri}, version {version}"
        raise TableFilesError(
            f"{what}: is no Delta table that can be read ({first_line(error)})"
        ) from None
    except OSError as error:  # the store refused, or did not answer, after delta-rs's retries
        raise TableFilesError(
            f"{uri}: the table's log cannot be read ({one_line(error)})"
        ) from None
    if deleted:
        raise TableFilesError(
            f"{uri}: version {table.version()} marks deleted rows of {deleted[0]} in a deletion vector, which is not "
            "applied here; rewrite the table without them (REORG TABLE … APPLY (PURGE))"
        )
    mode = (table.metadata().configuration or {}).get("delta.columnMapping.mode", "none")
    key = f"delta.columnMapping.{'id' if mode == 'id' else 'physicalName'}"
    schema = pa.schema(table.schema())
    unread = {} if mode == "none" else _structs(schema)
    root = place.name.rstrip("/") if place.scheme else place.delta["table_uri"]
    query = f"?{place.query}" if place.query else ""
    kinds = {f.name: f.type for f in adds.schema}
    files = {
        _url(root, unquote(added["path"]), query): {
            name.removeprefix(_PARTITION): pa.scalar(value, kinds[name])
            for name, value in added.items()
            if name.startswith(_PARTITION)
        }
        for added in adds.to_pylist()
    }
    return TableFiles(
        uri=uri if place.scheme else root,
        kind="delta",
        version=table.version(),
        schema=pa.schema([f for f in schema if f.name not in unread]),
        files=dict(sorted(files.items())),
        stored={
            column["name"]: column["metadata"].get(key, column["name"]) for column in described
        },
        unread=unread,
    )


def _url(root: str, path: str, query: str) -> str:
    """Returns the path or URI of a file that a log names below its root, or in full."""
    if path.startswith("file:"):
        return Place.of(path).path
    if "://" not in path:
        return path if path.startswith("/") else f"{root}/{path}" + (query if "://" in root else "")
    return path + query


# ---- Iceberg


def _open_iceberg(uri: str, version: int | None) -> TableFiles:
    table = _iceberg_table(uri)
    snapshot = table.current_snapshot() if version is None else table.snapshot_by_id(version)
    if snapshot is None:
        known = ", ".join(str(other.snapshot_id) for other in table.metadata.snapshots) or "none"
        what = "no snapshot" if version is None else f"no snapshot {version}"
        raise TableFilesError(f"{uri}: the table has {what} (known: {known})")
    scan = table.scan(snapshot_id=snapshot.snapshot_id)
    where = f"{uri}: snapshot {snapshot.snapshot_id}"
    try:
        tasks = list(scan.plan_files())
    except ValueError as error:
        raise TableFilesError(
            f"{where} cannot be read exactly ({first_line(error)}); {_REWRITE}"
        ) from None
    for task in tasks:
        for deletes in task.delete_files:
            raise TableFilesError(
                f"{where} marks deleted rows of {task.file.file_path} in {deletes.file_path}, which is not applied "
                f"here; {_REWRITE}"
            )
    query = "" if _CATALOG.fullmatch(uri) else f"?{Place.of(uri).query}".rstrip("?")
    described = scan.projection()  # the schema of this snapshot
    schema = pa.schema([(f.name, _SMALL.get(f.type, f.type)) for f in described.as_arrow()])
    unread = _structs(schema)
    kinds = {f.name: f.type for f in schema}
    files: dict[str, Mapping[str, pa.Scalar]] = {}
    for task in tasks:
        parts = table.specs()[task.file.spec_id].fields
        values = {
            described.find_column_name(part.source_id): task.file.partition[number]
            for number, part in enumerate(parts)
            if str(part.transform) == "identity"
        }
        files[_url("", task.file.file_path, query)] = {
            name: pa.scalar(value, kinds[name])
            for name, value in values.items()
            if name and name in kinds
        }
    return TableFiles(
        uri=uri,
        kind="iceberg",
        version=snapshot.snapshot_id,
        schema=pa.schema([f for f in schema if f.name not in unread]),
        files=dict(sorted(files.items())),
        stored={f.name: f.field_id for f in described.fields},
        unread=unread,
        added={
            f.name: pa.scalar(f.initial_default, kinds[f.name])
            for f in described.fields
            if f.initial_default is not None
        },
    )


def _iceberg_table(uri: str) -> Table:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.table import StaticTable

    try:
        if (named := _CATALOG.fullmatch(uri)) is not None:
            return load_catalog(named[1]).load_table(named[2])
        place = Place.of(uri)
        return StaticTable.from_metadata(place.name, place.iceberg)
    except Exception as error:  # each catalog and store has errors of its own
        raise TableFilesError(
            f"{uri}: is no Iceberg table that can be read ({type(error).__name__}: {first_line(error)}); name "
            "its newest …metadata.json, or iceberg://CATALOG/NAMESPACE.TABLE of a catalog that pyiceberg is set up for"
        ) from None
