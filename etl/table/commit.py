"""Publishes a version: writes the job's record, then makes one Delta commit.

Readers see nothing of a job before the commit, and all of it afterwards. The commit is based on the version that was
read. It uses no retries of delta-rs, because with them a stale overwrite would land in addition to an append.
"""

from __future__ import annotations

import datetime
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import Schema
from deltalake.transaction import AddAction, create_table_with_add_actions

from sluice.common.errors import RunFailure
from sluice.etl.schema import Field
from sluice.etl.table.data_files import METADATA_KEY, arrow_schema
from sluice.etl.table.job_record import JobRecord
from sluice.etl.table.new_files import CommitError
from sluice.etl.table.pins import folders_of
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable

MODES = ("create", "append", "overwrite")
FORGET = "forget"
"""The mode of a version that `sluice forget` made. No job can name it."""


class CommitConflict(RunFailure):
    """Another job published first, or a vacuum took files of this job. Nothing of this job is visible. The message
    says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The version that a job starts from."""

    version: int | None
    """The number of that version. None if there is no table yet."""
    schema: pa.Schema | None = None

    @classmethod
    def read(cls, store: TableStore) -> Base:
        try:
            table = DeltaTable(**store.delta)
        except TableNotFoundError:
            return cls(version=None)
        return cls(version=table.version(), schema=pa.schema(table.schema()))

    @property
    def next(self) -> int:
        """The number of the version that a commit on this version makes."""
        return 0 if self.version is None else self.version + 1

    def permit(self, mode: str, uri: str) -> None:
        """Refuses a job before any work if its commit would be refused, or would damage the table."""
        if mode not in (*MODES, FORGET):
            raise CommitError(f"mode {mode!r} is none of {', '.join(MODES)}")
        if mode == "create" and self.version is not None:
            raise CommitError(
                f"{uri}: a table is already there (version {self.version}); "
                "use --mode append or overwrite, or another --output"
            )
        if mode != "create" and self.version is None:
            raise CommitError(f"{uri}: there is no table to {mode}; use --mode create")
        if self.schema is not None and "partition" in self.schema.names:
            raise CommitError(
                f"{uri}: this table has partitions, which left Sluice in release 0.3; choose another --output"
            )

    def permit_append(self, stored: pa.Schema, uri: str) -> None:
        """Refuses to append rows with other columns than the version has. Inputs may have new names."""
        have, want = (
            {
                f.name: {
                    "type": str(f.type),
                    **json.loads((f.metadata or {}).get(METADATA_KEY, b"{}")),
                    "inputs": None,
                }
                for f in schema or ()
            }
            for schema in (self.schema, stored)
        )
        other = next((name for name in {**want, **have} if have.get(name) != want.get(name)), None)
        if other is None:
            return
        if other not in have:
            how = "is not in the table"
        elif other not in want:
            how = "is not in this spec"
        else:
            how = f"is {have[other]} in the table and {want[other]} in this spec"
        raise CommitError(
            f"{uri}: cannot append, because column {other!r} {how}; to change columns and keep every id, pass "
            "--mode overwrite --update-state with all of the input, old and new; list columns that older "
            "files lack in input.optional"
        )


def new_job() -> str:
    """Returns a new unique name. Names sort by time."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def publish(store: TableStore, base: Base, record: JobRecord, fields: Sequence[Field]) -> int:
    """Writes the record, then commits its files on `base`. Returns the version. This is the only way to publish.

    If another job publishes before an append does, the append is tried again on the new version. The new version must
    have the same layout and fitted state."""
    if not record.files:
        raise CommitError("the job wrote no rows: nothing to publish")
    base.permit(record.mode, store.uri)
    stored = stored_schema(fields)
    first = base
    while True:
        if record.mode == "append":
            base.permit_append(stored, store.uri)
        record = replace(record, version=base.next)
        store.write_json(f"_sluice/jobs/{record.job}.json", record.to_json())
        _refuse_lost_files(store, record)
        try:
            _commit(store, base, record, stored)
            return base.next
        except (CommitFailedError, DeltaError) as error:
            now = Base.read(store)
            if now.version == base.version:
                raise CommitError(
                    f"{store.uri}: version {base.next} could not be published, and nothing of it is "
                    f"visible; see that its _delta_log can be written, and run it again ({error})"
                ) from error
            if (landed := _find_commit(store, record.job)) is not None:
                return landed
            can_retry = record.mode == "append" and record.state == record.parent
            since = first.version or 0
            if not can_retry or record.tails or not _has_same_state(store, now, record, since):
                read = "no table" if first.version is None else f"version {first.version}"
                raise CommitConflict(
                    f"{store.uri}: another job published version {now.version} while this one, which started from "
                    f"{read}, ran; nothing of this one is visible. Run it again."
                ) from error
            base = now


def _refuse_lost_files(store: TableStore, record: JobRecord) -> None:
    """Raises CommitConflict if files of the job are gone. A vacuum takes them if the job has run for a day, or if a
    host's clock says so."""
    needs = {f.path for f in record.files}
    if record.state:
        needs.add(f"_sluice/state/{record.state}/state.json")
    if lost := needs.difference(*map(store.files, folders_of(needs))):
        raise CommitConflict(
            f"{store.url(min(lost))}: this file of the job is gone, so nothing of the job is visible; a vacuum takes "
            "files of jobs that began more than a day ago; see that the clocks of all hosts are right, and run it again"
        )


def _commit(store: TableStore, base: Base, record: JobRecord, stored: pa.Schema) -> None:
    """Makes one Delta commit on a version. Raises delta-rs's errors."""
    schema = Schema.from_arrow(stored)
    now_ms = int(time.time() * 1000)
    added: list[Any] = []
    for f in record.files:
        count = json.dumps({"numRecords": f.rows})
        added.append(AddAction(f.path, f.bytes, {"split": f.split}, now_ms, True, count))
    properties = CommitProperties(
        custom_metadata={"job": record.job, "mode": record.mode}, max_commit_retries=0
    )
    # Old log files stay, because a pinned version must stay readable.
    hooks = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
    common: dict[str, Any] = {"commit_properties": properties, "post_commithook_properties": hooks}
    if base.version is None:
        create_table_with_add_actions(
            schema=schema,
            add_actions=added,
            mode="error",
            partition_by=["split"],
            **store.delta,
            **common,
        )
    else:
        DeltaTable(**store.delta, version=base.version).create_write_transaction(
            added,
            "append" if record.mode == "append" else "overwrite",
            schema,
            partition_by=["split"],
            **common,
        )


def stored_schema(fields: Sequence[Field]) -> pa.Schema:
    """Returns a table's schema with the column that is in the names of folders, not in files."""
    return arrow_schema(fields).append(pa.field("split", pa.string(), nullable=False))


def _find_commit(store: TableStore, job: str) -> int | None:
    """Returns the version of a job's commit, if the commit landed in spite of an error."""
    return next(
        (int(v["version"]) for v in DeltaTable(**store.delta).history() if v.get("job") == job),
        None,
    )


def _has_same_state(store: TableStore, now: Base, record: JobRecord, since: int) -> bool:
    """Returns whether the newest version has this job's rule, and the fitted state that the job applied. A value that
    was forgotten after version `since` may be among the job's rows, so its version is refused."""
    table = FeatureTable.open(store.uri, now.version)
    if not table.records or table.record.state != record.state:
        return False
    if any(v.mode == FORGET and v.version > since for v in table.history()):
        return False
    mine, theirs = record.identity, table.record.identity
    return mine is theirs or (mine is not None and theirs is not None and mine.is_same(theirs))
