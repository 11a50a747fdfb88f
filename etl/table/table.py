"""`FeatureTable`: one version of one of Sluice's Delta tables, for readers. Needs no Spark.

The version's files come from the Delta log and from job records. No folder is listed to read data, so readers never see
orphans or files of other versions.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.common.stores import StoreError
from sluice.etl.schema import CLOSE_RULE, BagSizes, DataFile, Field, Fingerprint, Version
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.table_transform import TableTransform, short_transforms, stored, transformed
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.data_files import METADATA_KEY
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.job_record import JobRecord, RecordError
from sluice.etl.table.store import TableStore, job_of
from sluice.etl.table.table_files import first_line, one_line, versioned
from sluice.etl.table.verify import verify

if TYPE_CHECKING:
    from deltalake import DeltaTable


class TableError(UsageError):
    """A table that cannot be read. The message names the table, or the file, and what to do."""


class ForeignDelta(TableError):
    """A Delta table that another program wrote."""


class Unreadable(TableError):
    """A log or a job's record that exists and cannot be read, so that the files of its version are unknown."""


class LostVersion(TableError):
    """A version of which a vacuum has removed files, or is removing them."""


@dataclass(frozen=True)
class FeatureTable:
    """One fixed version. Later commits do not change this object."""

    uri: str
    version: int
    fields: tuple[Field, ...]
    """The columns that a model gets, with those that transforms add."""
    files: tuple[DataFile, ...]
    """The files in the order of their jobs' versions, then of their names. The plan of rows relies on this order."""
    schema: pa.Schema
    """The schema of every file, in the order of `stored`."""
    records: Mapping[str, JobRecord]
    """The records of the jobs whose files this version holds."""
    permission: Permission = field(default=NOTHING, compare=False)
    """Which functions of its spec may be imported."""
    transforms: tuple[TableTransform, ...] = ()
    """The transforms that the loader and the server apply: those of its spec, then those of the caller."""

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        version: int | None = None,
        *,
        allow_code: Permission | Iterable[str] = (),
        transforms: Iterable[str] = (),
    ) -> FeatureTable:
        """Opens a version, by default the newest. `uri` may end in it: `TABLE@v3`.

        Imports nothing that the table names, except functions of the modules `allow_code` when they must run.
        `transforms` are applied after those of the spec. They are written as in `--transform`."""
        uri, version = versioned(os.fspath(uri), version)
        delta, store = _open_delta(uri, version)
        schema = pa.schema(delta.schema())
        columns = [f for f in schema if METADATA_KEY in (f.metadata or {})]
        if not columns:
            raise ForeignDelta(
                f"{uri}: is a Delta table that another program wrote: no column has a role; `sluice guess {uri} "
                "--out spec.toml` writes a spec. With it, `sluice train --spec spec.toml` trains on the table, and "
                f"`sluice etl --spec spec.toml --input {uri}` makes a feature table of it"
            )
        # pa.table would import pandas.
        paths = [unquote(path) for path in delta.get_add_actions().column("path").to_pylist()]
        try:
            records = {
                job: _record(store, job) for job in sorted({job_of(p) for p in paths} - {""})
            }
        except LostVersion:
            # A vacuum keeps the newest version, so there is a newer one now.
            if version is None and _open_delta(uri, None)[0].version() > delta.version():
                return cls.open(uri, allow_code=allow_code, transforms=transforms)
            raise
        newest = max(records.values(), key=lambda r: r.version) if records else None
        table = cls(
            uri=store.uri,
            version=delta.version(),
            fields=tuple(_field(f, newest, records.values()) for f in columns),
            files=_data_files(store, paths, records.values()),
            schema=pa.schema([pa.field(f.name, f.type, nullable=f.nullable) for f in columns]),
            records=records,
            permission=Permission.of(allow_code),
        )
        text = table.record.spec if records else ""
        # Most tables are opened without parsing a spec.
        own = table.spec().transforms if "transform" in text else ()
        return table.transformed((*own, *short_transforms(transforms)))

    def transformed(self, transforms: Iterable[TableTransform]) -> FeatureTable:
        """Returns this version with more transforms. Raises SpecError if one needs a column that does not exist."""
        more = tuple(transforms)
        try:
            fields = transformed(self.fields, more)
        except SpecError as error:
            raise SpecError(f"{self.uri}, version {self.version}: {error}") from None
        return replace(self, fields=fields, transforms=(*self.transforms, *more))

    @property
    def stored(self) -> tuple[Field, ...]:
        """The columns of the files."""
        return stored(self.fields)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.split for f in self.files))

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files)

    def files_of(self, split: str) -> tuple[DataFile, ...]:
        """Returns the files of one split. Raises TableError if there is no such split."""
        if split not in self.splits:
            raise TableError(
                f"{self.uri}: no split {split!r} in version {self.version} "
                f"(there are: {', '.join(self.splits) or 'none'})"
            )
        return tuple(f for f in self.files if f.split == split)

    def rows_of(self, split: str) -> int:
        return sum(f.rows for f in self.files_of(split))

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.fields, [transform.described for transform in self.transforms])

    @property
    def record(self) -> JobRecord:
        """The record of the job that made the newest part of this version."""
        if not self.records:
            raise TableError(f"{self.uri}: version {self.version} is empty")
        return max(self.records.values(), key=lambda r: r.version)

    def spec(self) -> Spec:
        """Returns the spec that made its newest part. Raises TableError if that part was made without one."""
        if not self.record.spec:
            raise TableError(
                f"{self.uri}: version {self.version} was not made by etl/job.py: it has no feature spec"
            )
        return Spec.parse(self.record.spec, f"{self.uri}, version {self.version}", self.permission)

    def state(self) -> FittedState | None:
        """Returns what the operators of this version have learned, or None if the spec fits nothing."""
        return (
            FittedState.load(TableStore(self.uri), self.record.state) if self.record.state else None
        )

    @property
    def fitted_on(self) -> str | None:
        """The split that `state` was learned from. None if the spec fits nothing."""
        return (
            FittedState.learned_from(TableStore(self.uri), self.record.state)
            if self.record.state
            else None
        )

    def history(self) -> tuple[Version, ...]:
        """Returns the versions up to this one, newest first."""
        return tuple(v for v in self._every_version() if v.version <= self.version)

    def _every_version(self) -> tuple[Version, ...]:
        """Returns all versions, newest first. Opens the newest, because Delta counts versions from the open one."""
        from deltalake import DeltaTable

        store = TableStore(self.uri)
        versions = []
        for entry in DeltaTable(**store.delta).history():
            if (job := entry.get("job")) is None:
                continue
            try:
                record = _record(store, job)
            except TableError:
                continue  # a vacuum has removed the record
            at = datetime.datetime.fromtimestamp(entry["timestamp"] / 1000, datetime.UTC)
            versions.append(
                Version(
                    version=entry["version"],
                    at=at.isoformat(timespec="seconds"),
                    mode=record.mode,
                    job=job,
                    rows=record.rows,
                )
            )
        return tuple(versions)

    def check(self) -> list[str]:
        """Returns what is wrong with this version's files, one line each. Names orphans, and does not read them."""
        store = TableStore(self.uri)
        published = {v.job for v in self._every_version()} | self.records.keys()
        known = {f.path for job in published for f in _record(store, job).files}
        return verify(store, self.files, self.stored, self.schema, listed=known)


def check_values(table: FeatureTable, spec: Spec) -> None:
    """Raises TableError if an earlier rule converted values of a column, and `spec` would now give others."""
    # A column by `CLOSE_RULE` keeps its learned state, and was converted by the newest rule.
    rules = {f.name: f.values_rule for f in table.fields if f.values_rule != CLOSE_RULE}
    for f in spec.fields():
        if rules.get(f.name, f.values_rule) != f.values_rule:
            raise TableError(
                f"{table.uri}: column {f.name!r} was made by Sluice 0.2, in which whole numbers of a [[history]] "
                "from 1e10 on, and the keys of a [[join]] by float, were other texts, so new rows would get "
                "other values; make the table anew from all of its input: sluice etl --spec … --output "
                f"{table.uri} --mode overwrite --update-state --input …"
            )


def _open_delta(uri: str | os.PathLike[str], version: int | None) -> tuple[DeltaTable, TableStore]:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    if os.path.isfile(uri):
        raise TableError(
            f"{uri}: is a file, and a feature table is a folder; `sluice etl` makes a table of files"
        )
    try:
        store = TableStore(uri)
        return DeltaTable(**store.delta, version=version), store
    except (TableNotFoundError, StoreError) as error:
        why = first_line(error) if isinstance(error, StoreError) else _why_missing(os.fspath(uri))
        raise TableError(
            f"{uri}: there is no feature table here ({why}); `sluice etl` makes one"
        ) from None
    except DeltaError as error:
        if version is not None and version > (last := FeatureTable.open(uri).version):
            raise TableError(
                f"{uri}: there is no version {version}: the newest is {last}"
            ) from None
        what = "the table's log" if version is None else f"version {version}"
        raise TableError(f"{uri}: {what} cannot be read ({first_line(error)})") from None
    except OSError as error:  # the store refused, or did not answer, after delta-rs's retries
        raise Unreadable(
            f"{uri}: the table's log cannot be read ({one_line(error)}); see that the disk or store "
            "works and that this user or the credentials in the environment may read it, and try again"
        ) from None


def _data_files(
    store: TableStore, paths: list[str], records: Iterable[JobRecord]
) -> tuple[DataFile, ...]:
    """Returns the files of the log in the order of their jobs' versions, then of their names."""
    recorded = {f.path: (r.version, f) for r in records for f in r.files}
    for path in paths:
        if path not in recorded:
            raise TableError(
                f"{store.url(path)}: no job record names this file; was it added by another program? Only "
                "files of `sluice etl` can be read: make the table again with it"
            )
    return tuple(
        DataFile(
            path=store.url(path),
            rows=file.rows,
            bytes=file.bytes,
            split=file.split,
            row_group_rows=file.row_group_rows,
            content=file.sha256,
        )
        for _, path, file in sorted(
            ((recorded[p][0], p, recorded[p][1]) for p in paths), key=lambda file: file[:2]
        )
    )


def _why_missing(uri: str) -> str:
    """Explains why there is no table."""
    if "://" in uri:
        return "nothing is there"
    if not os.path.isdir(uri):
        return "there is no such folder"
    return (
        "its _delta_log holds no version"
        if os.path.isdir(os.path.join(uri, "_delta_log"))
        else "the folder has no _delta_log"
    )


def _record(store: TableStore, job: str) -> JobRecord:
    path = f"_sluice/jobs/{job}.json"
    try:
        return JobRecord.from_json(store.read_json(path))
    except FileNotFoundError:
        raise LostVersion(
            f"{store.url(path)}: the job's record is missing, and its files cannot be read without it; "
            "was this version removed by vacuum?"
        ) from None
    except OSError as error:
        raise Unreadable(
            f"{store.url(path)}: cannot be read ({first_line(error)}); see that its disk or store "
            "works, and try again"
        ) from None
    except (RecordError, ValueError) as error:
        raise Unreadable(f"{store.url(path)}: {first_line(error)}") from None


def _field(f: pa.Field, newest: JobRecord | None, records: Iterable[JobRecord]) -> Field:
    about = json.loads(f.metadata[METADATA_KEY])
    return Field(
        name=f.name,
        role=about["role"],
        type=f"list<{f.type.value_type}>" if pa.types.is_list(f.type) else str(f.type),
        layout=about["layout"],
        width=about["width"],
        online=tuple(about["online"]),
        inputs=tuple(about["inputs"]),
        values_rule=about.get("values_rule", 1),
        nullable=f.nullable and bool(about["online"]),
        cardinality=newest.cardinalities.get(f.name) if newest else None,
        bag=_bag([(r.bags[f.name], r.rows) for r in records if f.name in r.bags]),
    )


def _bag(bags: list[tuple[BagSizes, int]]) -> BagSizes | None:
    """Returns the smallest, mean and largest bag over all jobs' rows."""
    if not bags:
        return None
    mean = sum(bag[1] * rows for bag, rows in bags) / max(1, sum(rows for _, rows in bags))
    return min(bag[0] for bag, _ in bags), mean, max(bag[2] for bag, _ in bags)
