"""Runs a job on an engine: `run_job` makes and publishes a version."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sluice.common.errors import InputError
from sluice.etl.apply.features import cardinalities
from sluice.etl.apply.learned_rows import learned_from_another_split
from sluice.etl.apply.number_limits import is_late
from sluice.etl.apply.row_counts import RowCounts
from sluice.etl.apply.row_placement import WritePlan
from sluice.etl.apply.unreadable import refuse_lost
from sluice.etl.jobs.engine import Engine, fit
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.job_warnings import (
    INPUT_CHECKS,
    VERSION_CHECKS,
    CountedInput,
    NewVersion,
    count_by_split,
)
from sluice.etl.schema import Field, Fingerprint
from sluice.etl.spec.row_identity import ACCEPT, SplitMoved
from sluice.etl.table.commit import CommitConflict, publish
from sluice.etl.table.fitted_state import FittedState, StateError
from sluice.etl.table.job_record import FileRecord, JobRecord, shares
from sluice.etl.table.new_files import CommitError
from sluice.etl.table.profile import DriftError, Profile, drift
from sluice.etl.table.sketch import Sketch
from sluice.etl.table.split_rows import trained_on
from sluice.etl.table.store import folder_of, folder_of_tails
from sluice.etl.table.table import FeatureTable
from sluice.etl.table.vacuum import JOB

_REJECTS = "_sluice/rejects"
_WAYS = {
    "mapped file": "looked up in a file, because it is large",
    "window": "joined by time (rows of both tables are sorted together)",
    "broadcast": "joined in memory (every worker gets the whole side table)",
    "shuffle": "joined by key (rows of both tables are sent between workers)",
}
_SHOWN = 200  # how many characters of a row are quoted


class TooManyRejects(InputError):
    """More rows of an input are rejected than the job allows."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a job did."""

    rows_in: int
    rows_out: int
    rejected: Mapping[str, int]
    version: int
    fingerprint: Fingerprint
    files: int
    splits: Mapping[str, int]
    ways: Mapping[str, str]
    """How rows were joined with each fitted table in files, and with each side table: see `Engine.ways`."""
    engine: str
    """`spark` or `local`."""
    inputs: Mapping[str, int]
    """The version of each Delta or Iceberg table that was read."""
    late: int
    """The number of an append's rows that are older than rows of the table from which their histories continue."""


def run_job(job: Job, engine: Engine) -> Result:
    """Makes the version. Readers see nothing of it before the last step, and all of it afterwards."""
    try:
        return _JobRun(job, engine).run()
    finally:
        engine.close()


class _JobRun:
    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self.spec = job.spec
        self.store = job.store
        self.engine = engine
        self.progress = engine.progress
        self.rejects = job.rejects or job.store.url(f"{_REJECTS}/{job.name}")
        self.is_state_saved = False
        self.is_input_accepted = False

    def run(self) -> Result:
        job = self.job
        self.engine.check()
        self._warn_of_spec()
        try:
            record, fields, counted, ways = self._make()
        except BaseException as error:
            self._clean(error)
            raise
        try:
            # Only the log knows whether the commit landed.
            version = publish(self.store, job.base, record, fields)
        except CommitConflict:
            self._remove_files()
            raise
        if job.base.version is None:
            # This job has corrected the mistakes of those that were refused.
            jobs = {path.split("/")[2] for path in self.store.files(_REJECTS)} - {job.name}
            for name in filter(re.compile(JOB).fullmatch, jobs):
                self.store.remove(f"{_REJECTS}/{name}")
        return Result(
            rows_in=counted.parsed + sum(counted.rejected.values()),
            rows_out=record.rows,
            rejected=counted.rejected,
            version=version,
            fingerprint=Fingerprint.of(fields),
            files=len(record.files),
            splits=count_by_split(record.files),
            ways=ways,
            engine=self.engine.name,
            inputs=self.job.input_versions,
            late=self.engine.late,
        )

    def _make(self) -> tuple[JobRecord, tuple[Field, ...], RowCounts, Mapping[str, str]]:
        """Makes the version's files. Returns its record and columns, the counts, and how rows were joined."""
        job, progress = self.job, self.progress
        with progress.stage("fitting" if job.learns else "counting rows"):
            if job.learns:
                state, counted = fit(self.engine, job.before)
            else:
                state, counted = (
                    job.before or FittedState(),
                    self.engine.sums(None, FittedState(), {}).counted,
                )
        self._check_input(counted)
        self.is_input_accepted = True
        ways = self.engine.ways(state)
        for key, way in ways.items():
            progress.say(f"  {key}: {_WAYS.get(way, way)}")
        with progress.stage(f"writing {counted.rows:,} rows"):
            if self.spec.fitted:
                state.save(self.store)
                self.is_state_saved = True
            plan = WritePlan.of(self.spec, counted, job.rule_before)
            written = self.engine.write(state, plan)
        with progress.stage("checking"):
            new = sorted(written.files, key=lambda file: file.record.path)
            files = tuple(file.record for file in new)
            profile = Profile.joined(file.profile for file in new)
            counted = self._check_written(counted, sum(f.rows for f in files))
            record = self._make_record(
                state, counted, plan.bounds.sketches(written.seen), files, profile
            )
            version = NewVersion(job, record, new, self._base)
            self._warn(text for check in VERSION_CHECKS for text in check(version))
            self._compare(version)
            self._check_drift(record)
        fields = self.spec.fields(record.cardinalities, profile.bags, state.tables)
        return record, fields, counted, ways

    def _warn_of_spec(self) -> None:
        before = self.job.before
        if self.spec.unused:
            self.progress.say(f"note: the input columns {', '.join(self.spec.unused)} are not used")
        if before is not None and learned_from_another_split(before, self.spec):
            self.progress.say(
                f"note: this job applies what was learned from the rows of split {before.fitted_on!r}, so "
                "tests on this table may look better than they are; --mode overwrite --refit with all of the "
                f"input learns from split {self.spec.table.training!r} alone"
            )

    def _clean(self, error: BaseException) -> None:
        """Removes all that a failed job wrote. The rejects stay if they are why it failed."""
        self.engine.close()
        self._remove_files()
        if not self.is_state_saved:
            self.store.remove(self.job.files_of_state)
        if self.is_input_accepted and not isinstance(error, TooManyRejects):
            self.store.remove(f"{_REJECTS}/{self.job.name}")

    def _remove_files(self) -> None:
        self.store.remove(folder_of(self.job.name))
        self.store.remove(folder_of_tails(self.job.name))

    def _check_input(self, counted: RowCounts) -> None:
        """Writes the rejected rows, and refuses an input with too many of them, or without the rows that it needs."""
        job, table = self.job, self.spec.table
        names = job.input_names
        rejected = sum(counted.rejected.values())
        if rejected:
            with self.progress.stage(f"writing {rejected:,} rejected rows"):
                self.engine.rejects.write(self.rejects)
            for reason, times in counted.rejected.items():
                self.progress.say(f"  {times:,} rejected: {reason}")
        if not counted.parsed + rejected:
            raise InputError(f"{names}: holds no rows")
        self._check_rejects(counted)
        found = CountedInput(job, counted, self.engine.late)
        self._warn(text for check in INPUT_CHECKS for text in check(found))
        if not counted.rows:
            raise InputError(f"{names}: no row is left after the spec's filters and samples")
        learns = any(not learned.op.of_all_splits for learned in self.spec.fitted)
        if job.before is None and learns and not counted.training:
            raise InputError(
                f"{names}: none of {counted.rows:,} rows lies in split {table.training!r}, from which "
                "everything is learned; look at table.split"
            )
        rules = self.spec.rows
        if not rules.negatives and not rules.relational and counted.rows < counted.parsed:
            self.progress.say(
                f"  {counted.parsed - counted.rows:,} rows are left out by filters, a sample, or a "
                "split_column that names no split"
            )
        # Rows without a label may come at any time if they have a split of their own.
        may_be_null = [self.spec.label] if table.unlabelled else []
        refuse_lost(job.parent, counted, (*job.accept_nulls, *may_be_null), self.progress.say)

    def _check_rejects(self, counted: RowCounts) -> None:
        """Refuses a job with too many rejected rows."""
        rejected = sum(counted.rejected.values())
        total = counted.parsed + rejected
        if rejected <= self.job.max_rejects * total and counted.parsed:
            return
        hints = []
        if f"{self.spec.label}: missing" in counted.rejected:
            hints.append("table.unlabelled gives rows without a label a split of their own")
        if self.spec.input.format != "json" and any(
            reason.endswith("text") for reason in counted.rejected
        ):
            hints.append("input.encoding names the encoding of texts, and `sluice guess` finds it")
        raise TooManyRejects(
            f"{rejected:,} of {total:,} rows are rejected, more than --max-rejects "
            f"{self.job.max_rejects:g} allows ({self._describe_rejects(counted.rejected)}); nothing was "
            f"published; {'; '.join([f'rows and reasons are in {self.rejects}', *hints])}"
        )

    def _describe_rejects(self, rejected: Mapping[str, int]) -> str:
        """Names the most frequent reason, with a row that was rejected for it."""
        reason = max(rejected, key=lambda r: rejected[r])
        row = self.engine.rejects.examples.get(reason)
        if row is None:
            return f"most often: {reason}"
        line = f", line {row['line']}" if "line" in row else ""
        place = f" in {row['file']}{line}" if "file" in row else ""
        return f"most often: {reason}; for instance{place}: {row['raw'][:_SHOWN]!r}"

    def _check_written(self, counted: RowCounts, rows: int) -> RowCounts:
        """Returns the counts after `rows` rows were written. Some may have been rejected only then."""
        if rows < counted.rows and any(is_late(column) for column in self.spec.columns):
            counted = self._reject_late_rows(counted, rows)
        if rows != counted.rows:
            raise CommitError(
                f"{rows:,} rows were written but {counted.rows:,} counted: did the input change "
                "meanwhile? Nothing was published; run it again"
            )
        return counted

    def _reject_late_rows(self, counted: RowCounts, rows: int) -> RowCounts:
        """Rejects rows of which the writing pass made a number that may not be published. Operators have counted these
        rows when they learned."""
        with self.progress.stage(f"writing {counted.rows - rows:,} more rejected rows"):
            rejected = self.engine.rejects.write(self.rejects)
        for reason, times in rejected.items():
            if more := times - counted.rejected.get(reason, 0):
                self.progress.say(f"  {more:,} rejected: {reason}")
        late = sum(rejected.values()) - sum(counted.rejected.values())
        # [negatives] adds rows that are in no file of the input, and some of those may be left out, too.
        kept = rows if self.spec.rows.negatives and late else counted.rows - late
        corrected = replace(counted, rejected=rejected, parsed=counted.parsed - late, rows=kept)
        self._check_rejects(corrected)
        return corrected

    def _make_record(
        self,
        state: FittedState,
        counted: RowCounts,
        sketches: Mapping[str, Mapping[str, Sketch]],
        files: tuple[FileRecord, ...],
        profile: Profile,
    ) -> JobRecord:
        spec, before = self.spec, self.job.parent
        profile_before = before.profile if before else {}
        old = Profile({name: dict(column) for name, column in profile_before.items()})
        lost_before = shares(before.raw_nulls, before.unread) if before else {}
        return JobRecord(
            job=self.job.name,
            mode=self.job.mode,
            version=self.job.base.next,
            rows=sum(f.rows for f in files),
            files=files,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            state=state.hash if spec.fitted else None,
            parent=before.state if before else None,
            spec=spec.text,
            seed=spec.table.seed,
            cardinalities=cardinalities(spec, state),
            rejected=counted.rejected,
            bags=profile.bags,
            profile=profile.columns,
            raw_nulls=counted.nulls,
            unread=counted.unread,
            drift=drift(old, profile, (lost_before, shares(counted.nulls, counted.unread))),
            tails=spec.rows.looks_back,
            inputs=self.job.input_versions,
            identity=spec.rule,
            engine=self.engine.name,
            layout=str(spec.table.layout),
            sketches={
                recognition: {split: sketch.to_json() for split, sketch in splits.items()}
                for recognition, splits in sketches.items()
            },
        )

    def _warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.progress.say(f"warning: {text}")

    @property
    def _base(self) -> FeatureTable | None:
        """The version before, if there is one."""
        version = self.job.base.version
        return None if version is None else FeatureTable.open(self.store.uri, version)

    def _compare(self, new: NewVersion) -> None:
        """Refuses a version whose test rows were training rows in the version before, or warns of it."""
        job = self.job
        if new.split_rows is None:
            return
        before, now = new.split_rows
        try:
            text = trained_on(before.trained, now).text
            what = f"{text} lay in 'train' in version {job.base.version}" if text else ""
        except SplitMoved as unknown:
            what = f"version {new.record.version}: {unknown}"
        if not what:
            return
        if job.before is not None and not job.before.tables.keys().isdisjoint(
            self.spec.learned_from_labels
        ):
            raise StateError(
                f"{what}, and what was learned from their labels is kept, so they would meet their own; "
                f"nothing was published; {job.advise_rebuild(self.spec)}"
            )
        if (
            job.split_moved == "refuse"
            and before.rule is not None
            and self.spec.rule.is_same(before.rule)
        ):
            raise SplitMoved(
                f"{what}; nothing was published; cut the splits as before, or accept it with {ACCEPT}"
            )
        self._warn(
            [f"{what}; a run that was trained on that version continues here only with {ACCEPT}"]
        )

    def _check_drift(self, record: JobRecord) -> None:
        """Warns of drift, or refuses it, as the spec says."""
        for kind, limits in self.spec.drift.items():
            for name, moved in record.drift.items():
                size = abs(moved[kind])
                what = f"drift: {kind} of column {name!r} is {moved[kind]:g} against the version before"
                if limits.refuse is not None and size >= limits.refuse:
                    raise DriftError(
                        f"{what}, and drift.{kind}.refuse = {limits.refuse:g}; nothing was published"
                    )
                if limits.warn is not None and size >= limits.warn:
                    self._warn([f"{what} (drift.{kind}.warn = {limits.warn:g})"])
