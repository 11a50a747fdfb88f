"""A feature table as its readers see it: `FeatureTable`, one version of one of Sluice's Delta tables. Needs no Spark.

The version's files come from the Delta log and from job records; no folder is ever listed to read data, so an orphan or
an older version's file cannot slip in.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from urllib.parse import unquote

import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.etl.schema import DataFile, Field, Fingerprint, Version
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.table_transform import TableTransform, short_transforms, stored, transformed
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.data_files import METADATA_KEY, job_of
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.job_record import JobRecord, RecordError
from sluice.etl.table.store import StoreError, TableStore
from sluice.etl.table.verify import verify


class TableError(UsageError):
    """A table that cannot be read: its message names the table, or the file, and what to do."""


class DamagedRecord(TableError):
    """A job's record that is there and cannot be understood: what its version needs is not known."""


@dataclass(frozen=True)
class FeatureTable:
    """One fixed version: later commits do not change what this object shows."""

    uri: str
    version: int
    fields: tuple[Field, ...]
    """The columns as a model sees them, with those that transforms add."""
    files: tuple[DataFile, ...]
    """The files, in the order of their jobs' versions, then of their names: the plan of rows relies on it."""
    schema: pa.Schema
    """The schema of every file, in the order of `stored`."""
    records: Mapping[str, JobRecord]
    """The records of the jobs whose files this version holds."""
    permission: Permission = field(default=NOTHING, compare=False)
    """Which of the functions that its spec names may be imported."""
    transforms: tuple[TableTransform, ...] = ()
    """What is left to the loader and the server: the transforms of its spec, then those that were asked for."""

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        version: int | None = None,
        *,
        allow_code: Permission | Iterable[str] = (),
        transforms: Iterable[str] = (),
    ) -> FeatureTable:
        """Opens a version. Nothing that the table names is imported, except functions of the modules `allow_code` when
        they must run. `transforms` come on top of the spec's, each as `--transform` has it
        (`sluice.etl.spec.table_transform.short_transforms`)."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        if os.path.isfile(uri):
            raise TableError(
                f"{uri}: is a file, and a feature table is a folder; `sluice etl` makes a table of files"
            )
        try:
            store = TableStore(uri)
            delta = DeltaTable(**store.delta, version=version)
        except (TableNotFoundError, StoreError) as error:
            why = _first_line(error) if isinstance(error, StoreError) else _lacking(os.fspath(uri))
            raise TableError(
                f"{uri}: there is no feature table here ({why}); `sluice etl` makes one"
            ) from None
        except DeltaError as error:
            if version is not None and version > (last := cls.open(uri).version):
                raise TableError(
                    f"{uri}: there is no version {version}: the newest is {last}"
                ) from None
            what = "the table's log" if version is None else f"version {version}"
            raise TableError(f"{uri}: {what} cannot be read ({_first_line(error)})") from None
        schema = pa.schema(delta.schema())
        if not any(METADATA_KEY in (f.metadata or {}) for f in schema):
            raise TableError(
                f"{uri}: is a Delta table that another program wrote: no column has a role; write a spec "
                'with format = "delta" for it, of which `sluice etl` makes a feature table'
            )
        adds = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
        paths = [unquote(a["path"]) for a in adds]
        records = {job: _record(store, job) for job in sorted({job_of(p) for p in paths} - {""})}
        known = {f.path: (r, f) for r in records.values() for f in r.files}
        missing = [p for p in paths if p not in known]
        if missing:
            raise TableError(
                f"{store.url(missing[0])}: no job record speaks of this file; was it added by another "
                "program? Only what `sluice etl` writes can be read: make the table again with it"
            )
        ordered = sorted((known[p][0].version, p) for p in paths)
        files = tuple(
            DataFile(
                path=store.url(p),
                rows=known[p][1].rows,
                bytes=known[p][1].bytes,
                split=known[p][1].split,
                row_group_rows=known[p][1].row_group_rows,
                content=known[p][1].sha256,
            )
            for _, p in ordered
        )
        newest = max(records.values(), key=lambda r: r.version) if records else None
        fields = tuple(
            _field(f, newest, records.values())
            for f in schema
            if METADATA_KEY in (f.metadata or {})
        )
        in_files = pa.schema(
            [pa.field(f.name, schema.field(f.name).type, nullable=f.nullable) for f in fields]
        )
        found = cls(
            store.uri, delta.version(), fields, files, in_files, records, Permission.of(allow_code)
        )
        return found.transformed((*found._spec_transforms(), *short_transforms(transforms)))

    def transformed(self, transforms: Iterable[TableTransform]) -> FeatureTable:
        """The same version with these transforms on top. SpecError if one needs a column that is not there."""
        more = tuple(transforms)
        try:
            fields = transformed(self.fields, more)
        except SpecError as error:
            raise SpecError(f"{self.uri}, version {self.version}: {error}") from None
        return replace(self, fields=fields, transforms=(*self.transforms, *more))

    def _spec_transforms(self) -> tuple[TableTransform, ...]:
        text = self.record.spec if self.records else ""
        return (
            self.spec().transforms if "transform" in text else ()
        )  # most tables are opened without parsing a spec

    @property
    def stored(self) -> tuple[Field, ...]:
        """The columns that files hold, as they hold them."""
        return stored(self.fields)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.split for f in self.files))

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files)

    def files_of(self, split: str) -> tuple[DataFile, ...]:
        """The files of one split; an unknown split is an error that names those there are."""
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
        return Fingerprint.of(self.fields, [one.described for one in self.transforms])

    @property
    def record(self) -> JobRecord:
        """The record of the job that made the newest part of this version."""
        if not self.records:
            raise TableError(f"{self.uri}: version {self.version} is empty")
        return max(self.records.values(), key=lambda r: r.version)

    def spec(self) -> Spec:
        """The spec that made its newest part. TableError if that was made without one."""
        if not self.record.spec:
            raise TableError(
                f"{self.uri}: version {self.version} was not made by etl/job.py: it has no feature spec"
            )
        return Spec.parse(self.record.spec, f"{self.uri}, version {self.version}", self.permission)

    def state(self) -> FittedState | None:
        """What the operators of this version had learned; None if the spec fits nothing."""
        return (
            FittedState.load(TableStore(self.uri), self.record.state) if self.record.state else None
        )

    @property
    def fitted_on(self) -> str | None:
        """The split whose rows `state` was learned from; None if the spec fits nothing."""
        return (
            FittedState.learned_from(TableStore(self.uri), self.record.state)
            if self.record.state
            else None
        )

    def history(self) -> tuple[Version, ...]:
        """The versions up to this one, newest first."""
        return tuple(v for v in self._every_version() if v.version <= self.version)

    def _every_version(self) -> tuple[Version, ...]:
        """All versions, newest first. Delta numbers them from the version that is open, so that has to be the
        newest."""
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
        """Lists everything that is wrong with this version's files, one line each; orphans are named but never read."""
        store = TableStore(self.uri)
        published = {v.job for v in self._every_version()} | self.records.keys()
        known = {f.path for job in published for f in _record(store, job).files}
        digests = {store.url(f.path): f.sha256 for r in self.records.values() for f in r.files}
        return verify(store, self.files, self.stored, self.schema, digests=digests, listed=known)


def _lacking(uri: str) -> str:
    """Why there is no table, in plain words."""
    if "://" in uri:
        return "nothing lies there"
    if not os.path.isdir(uri):
        return "there is no such folder"
    return (
        "its _delta_log holds no version"
        if os.path.isdir(os.path.join(uri, "_delta_log"))
        else "the folder has no _delta_log"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _record(store: TableStore, job: str) -> JobRecord:
    path = f"_sluice/jobs/{job}.json"
    try:
        return JobRecord.from_json(store.read_json(path))
    except FileNotFoundError:
        raise TableError(
            f"{store.url(path)}: the job's record is missing, and its files cannot be read without it; "
            "was this version removed by vacuum?"
        ) from None
    except OSError as error:
        raise DamagedRecord(
            f"{store.url(path)}: cannot be read ({_first_line(error)}); see that its disk or store "
            "works, and try again"
        ) from None
    except (RecordError, ValueError) as error:
        raise DamagedRecord(f"{store.url(path)}: {_first_line(error)}") from None


def _type_name(kind: pa.DataType) -> str:
    return f"list<{kind.value_type}>" if pa.types.is_list(kind) else str(kind)


def _field(f: pa.Field, newest: JobRecord | None, records: Iterable[JobRecord]) -> Field:
    about = json.loads(f.metadata[METADATA_KEY])
    return Field(
        name=f.name,
        role=about["role"],
        type=_type_name(f.type),
        layout=about["layout"],
        width=about["width"],
        online=tuple(about["online"]),
        inputs=tuple(about["inputs"]),
        nullable=f.nullable and bool(about["online"]),
        cardinality=newest.cardinalities.get(f.name) if newest else None,
        bag=_bag([(r.bags[f.name], r.rows) for r in records if f.name in r.bags]),
    )


def _bag(bags: list[tuple[tuple[int, float, int], int]]) -> tuple[int, float, int] | None:
    """The smallest, mean and largest bag over all jobs' rows."""
    if not bags:
        return None
    mean = sum(bag[1] * rows for bag, rows in bags) / max(1, sum(rows for _, rows in bags))
    return min(bag[0] for bag, _ in bags), mean, max(bag[2] for bag, _ in bags)
