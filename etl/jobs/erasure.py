"""`Erasure`: removes a key from all that a table's folder holds. `sluice forget` runs it.

First it publishes a version without the key. Then it removes all versions before. In between, a file says what is still
to be done, so a second call finishes what a kill has broken off.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from sluice.common.errors import RunFailure, UsageError
from sluice.etl.jobs.key_trace import KeyTrace
from sluice.etl.spec.permission import Permission
from sluice.etl.table.commit import FORGET, Base, CommitConflict, new_job, publish
from sluice.etl.table.fitted_state import FileBackedState, FittedState
from sluice.etl.table.job_record import JobRecord
from sluice.etl.table.new_files import NewFile, write_file
from sluice.etl.table.pins import pins
from sluice.etl.table.profile import Profile
from sluice.etl.table.split_rows import SplitRows
from sluice.etl.table.store import TableStore, folder_of, folder_of_tails, job_of, tail_of_join
from sluice.etl.table.table import FeatureTable
from sluice.etl.table.vacuum import DAY_S, vacuum

_PENDING = "_sluice/forget.json"


@dataclass(frozen=True, kw_only=True)
class Erasure:
    """One value of an input column, which leaves one table."""

    store: TableStore
    column: str
    value: str
    permission: Permission
    shared: bool
    """Whether rows of other values may be removed, if they cannot be told from the key's."""

    def publish(self, now: float) -> dict[str, Any]:
        """Publishes a version without the key, unless the newest has nothing of it. Returns what was removed. Raises
        UsageError, and changes nothing, if a version is being read."""
        store = self.store
        for pin in pins(store, now):
            until = datetime.datetime.fromtimestamp(pin.expires, datetime.UTC)
            raise UsageError(
                f"{store.uri}: {pin.name} reads version {pin.version}, which would lose its files; nothing was "
                f"removed; end that reader, or wait until its claim ends ({until:%H:%M} UTC, unless it renews it)"
            )
        if (pending := self._pending()) is not None:
            return pending
        base = Base.read(store)
        table = FeatureTable.open(store.uri, base.version, allow_code=self.permission)
        if any(f"{mark}{self.value}{mark}" in table.record.spec for mark in ("'", '"')):
            raise UsageError(
                f"{store.uri}: the spec of version {table.version} names the value of --key; nothing was removed; take "
                "it out of the spec, and publish a version by it with --mode overwrite --update-state"
            )
        rewriting = _Rewriting(table, self.column, self.value, new_job())
        try:
            return self._publish_without(rewriting, base)
        except (UsageError, CommitConflict):
            for folder in (*rewriting.folders, _PENDING):
                store.remove(folder)
            raise

    def _publish_without(self, rewriting: _Rewriting, base: Base) -> dict[str, Any]:
        trace, table = rewriting.trace, rewriting.table
        record, state, removed = rewriting.run()
        is_new = any(removed.values())
        done = {
            "version": base.next if is_new else table.version,
            "before": table.version,
            "at": time.time() if is_new else 0.0,
            "job": record.job,
            **removed,
            "ids": dict(trace.ids),
        }
        if is_new and trace.others:
            raise UsageError(
                f"--key {self.column}=…: other rows may hold it in {', '.join(sorted(trace.others))}; nothing was "
                "removed; make the table anew by --mode overwrite --refit from an input without the value, then "
                "run this again: it removes the versions before"
            )
        if removed["shared"] and not self.shared:
            raise UsageError(
                f"--key {self.column}=…: {removed['shared']:,} rows may be of other values, because "
                f"{', '.join(trace.marks)} gives several values one id; nothing was removed; pass "
                f'--shared to remove them, or make the table anew with {{from = "{self.column}", role = "key"}}, read '
                "as text"
            )
        if not is_new:
            self.store.remove(folder_of(record.job))
            return done
        if state is not None:
            state.save(self.store)
        self.store.write_json(_PENDING, {"key": [self.column, self.value], "removed": done})
        publish(self.store, base, record, table.spec().fields())
        return done

    def finish(self, removed: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Removes all files of versions before. Returns what was removed in all. Raises RunFailure if a reader has
        pinned one of these versions meanwhile."""
        store = self.store
        jobs = [version.job for version in FeatureTable.open(store.uri).history()]
        states = [store.read_json(f"_sluice/jobs/{each}.json")["state"] for each in jobs]
        # No job that began before this version was published can still publish, so its files are of no use.
        at = removed["at"]
        done = vacuum(
            store,
            keep=1,
            now=at or now,
            grace_s=0.0 if at else DAY_S,
            at_once=frozenset((*jobs, *states)),
        )
        if len(done.kept_versions) > 1:
            raise RunFailure(
                f"{store.uri}: version {done.kept_versions[0]} holds the key and was pinned meanwhile; run it again "
                "when its reader has ended"
            )
        store.remove(_PENDING)
        return {**removed, "files": len(done.files), "passed_over": list(done.passed_over)}

    def _pending(self) -> dict[str, Any] | None:
        """Returns what an earlier call has removed that was broken off after it had published."""
        try:
            about = self.store.read_json(_PENDING)
        except FileNotFoundError:
            return None
        removed: dict[str, Any] = about["removed"]
        if removed["job"] not in {v.job for v in FeatureTable.open(self.store.uri).history()}:
            return None
        if about["key"] != [self.column, self.value]:
            raise UsageError(
                f"{self.store.uri}: a `sluice forget` with another --key was broken off after version "
                f"{removed['version']}; run that one again first"
            )
        return removed


@dataclass(frozen=True)
class _Rewriting:
    """Writes the files of a version again, without a key."""

    table: FeatureTable
    column: str
    value: str
    job: str

    @cached_property
    def _store(self) -> TableStore:
        return TableStore(self.table.uri)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of files that only this version has."""
        return folder_of(self.job), folder_of_tails(self.job), f"_sluice/state/{self.job}"

    @cached_property
    def trace(self) -> KeyTrace:
        return self._trace_of(self.table.record)

    def run(self) -> tuple[JobRecord, FittedState | None, dict[str, int]]:
        """Returns the record of what was written, what operators learned, and the counts of what is missing there."""
        before = self.table.record
        written, shared = self._write_rows()
        state, learned = self._clear_state()
        rows = sum(file.record.rows for file in written)
        profile = Profile.joined(file.profile for file in written)
        record = replace(
            before,
            job=self.job,
            mode=FORGET,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rows=rows,
            state=state.hash if state else None,
            parent=before.state,
            files=tuple(file.record for file in written),
            bags=profile.bags,
            profile=profile.columns,
            drift={},
            sketches=SplitRows.of(self.table.records.values()).to_json()["sketches"],
        )
        served = self._clear_tails() if before.tails else 0
        counts = {"rows": self.table.rows - rows, "shared": shared}
        return record, state, {**counts, "learned": learned, "served": served}

    def _trace_of(self, record: JobRecord) -> KeyTrace:
        state = FittedState.load(self._store, record.state) if record.state else FittedState()
        return KeyTrace.of(self.table.spec(), state, self.column, self.value)

    def _write_rows(self) -> tuple[list[NewFile], int]:
        """Writes all rows of others, in the order in which they are. Returns also how many of the rows that it left out
        may be of others."""
        spec, written, shared = self.table.spec(), list[NewFile](), 0
        traces = {job: self._trace_of(record) for job, record in self.table.records.items()}

        def kept(path: str) -> Iterator[pa.Table]:
            nonlocal shared
            trace = traces[job_of(path)]
            with self._store.parquet(path) as file:
                for number in range(file.num_row_groups):
                    rows = file.read_row_group(number)
                    left = trace.remove_rows(rows)
                    shared += trace.are_shared * (len(rows) - len(left))
                    if len(left):
                        yield left

        for number, file in enumerate(self.table.files):
            new = write_file(
                self._store,
                f"{folder_of(self.job)}/split={file.split}/part-{number:05}.parquet",
                kept(self._store.relative(file.path)),
                spec.fields(),
                split=file.split,
                speed=self.table.record.layout == "speed",
                buckets=spec.buckets,
            )
            if new.record.rows:
                written.append(new)
            else:
                self._store.remove(new.record.path)
        return written, shared

    def _clear_state(self) -> tuple[FittedState | None, int]:
        """Returns what operators learned without the key, and how many entries were the key's."""
        state, times = self.table.state(), 0
        if state is None:
            return None, 0
        tables = dict(state.tables)
        for learned in self.table.spec().fitted:
            if learned.key in self.trace.learned:
                cleared, more = self.trace.clear(learned.key, learned.op, state[learned.key])
                if more and learned.key in state.stored:
                    path = f"_sluice/state/{self.job}/{quote(learned.key, safe='')}.parquet"
                    self._store.write_table(path, cleared)
                    tables[learned.key] = FileBackedState.of(self._store, [path])
                elif more:
                    tables[learned.key] = cleared
                times += more
        return replace(state, tables=tables), times

    def _clear_tails(self) -> int:
        """Writes what a server knows of other rows without the key. Returns how many of its keys were this one."""
        rules, times = self.table.spec().rows, 0
        tails = {tail_of_join(number): join.on for number, join in enumerate(rules.joins)}
        tails |= {each.name: (each.by,) for each in rules.histories}
        for name, keys in tails.items():
            for path in self._store.files(folder_of_tails(self.table.record.job, name)):
                if path.endswith(".parquet"):
                    tail = self._store.read_table(path)
                    kept = self.trace.remove_tail(tail, keys) if self.trace.column in keys else tail
                    times += len(tail) - len(kept)
                    new = path.replace(self.table.record.job, self.job)
                    self._store.write_table(new, kept)
        return times
