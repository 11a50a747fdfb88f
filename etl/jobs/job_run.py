"""Runs a job from beginning to end: `Job` checks what it can without an engine, then `run` makes and publishes a
version."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.common.errors import InputError
from sluice.common.machine import this_machine
from sluice.common.suggest import nearest
from sluice.etl.apply.counts import Counted
from sluice.etl.apply.features import cardinalities
from sluice.etl.apply.learned_rows import saw_others, why_labels_leak, why_not
from sluice.etl.apply.number_limits import is_late
from sluice.etl.apply.unreadable import refuse_lost
from sluice.etl.jobs.engine import Engine
from sluice.etl.jobs.fitting import count, fit
from sluice.etl.jobs.progress import STARTING, JobProgress
from sluice.etl.schema import Field, Fingerprint
from sluice.etl.spec.empty_splits import empty_splits
from sluice.etl.spec.placement import placement_of, with_placement
from sluice.etl.spec.row_identity import ACCEPT, Identity, SplitMoved
from sluice.etl.spec.spec import Spec
from sluice.etl.table.commit import Base, CommitConflict, new_job, publish, stored_schema
from sluice.etl.table.data_files import folder_of
from sluice.etl.table.fitted_state import FittedState, StateError
from sluice.etl.table.job_record import JobRecord, shares
from sluice.etl.table.new_files import CommitError, describe
from sluice.etl.table.profile import DriftError, Profile, drift
from sluice.etl.table.sketch import Sketch
from sluice.etl.table.split_rows import SplitRows, there_already, trained_on, under_rule
from sluice.etl.table.store import TableStore, folder_of_tails
from sluice.etl.table.table import FeatureTable
from sluice.etl.table.vacuum import JOB

MAX_REJECTS = 0.01
MAX_PAIRS = 4096
WORKER_BYTES = 256 * 2**20
"""How many bytes of what was learned a worker may hold, unless the caller says otherwise."""
_REJECTS = "_sluice/rejects"
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
    """How rows met each fitted table that is kept in files, and each side table: see `Engine.ways`."""
    engine: str
    """What did it: `spark` or `local`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, based on the version that the table has when it is made; wrong requests are refused at once."""

    spec: Spec
    inputs: tuple[str, ...]
    store: TableStore
    mode: str = "create"
    rejects: str | None = None
    """The folder for rejected rows; None: next to the table."""
    max_rejects: float = MAX_REJECTS
    reuse_state: bool = False
    update_state: bool = False
    refit: bool = False
    """Whether an overwrite learns everything anew, whatever the version before learned."""
    worker_bytes: int = WORKER_BYTES
    """How many bytes of what was learned a Python worker may hold; vocabularies beyond it are joined."""
    split_moved: str = "refuse"
    """Whether a job may `accept` that rows change their split."""
    accept_nulls: tuple[str, ...] = ()
    """Columns that may lose many more of their values than in the version before."""
    name: str = field(default_factory=new_job)
    base: Base = field(init=False)
    parent: JobRecord | None = field(init=False)
    """The record of the version before."""
    before: FittedState | None = field(init=False, repr=False)
    """The fitted state of the version before, if this job keeps it or adds to it."""
    rule_before: Identity | None = field(init=False, repr=False)
    """The rule of the version before, if this spec has its columns: its rows can then be recognised again."""

    def __post_init__(self) -> None:
        if self.split_moved not in ("refuse", "accept"):
            raise SplitMoved(f"split_moved = {self.split_moved!r}: must be refuse or accept")
        if self.mode == "append" and self.spec.input.place:
            raise InputError(
                f"{self.spec.name}: input.place says where a row lies in one job's input, and an append's "
                "rows would lie among the earlier ones; hand in all of the input with --mode overwrite"
            )
        self.spec.imported()  # a function that may not run is refused before any work
        base = Base.read(self.store)
        parent = None
        before = None
        there = {
            *self.spec.input.columns,
            *(column.name for column in self.spec.columns),
            *(
                name
                for join in self.spec.rows.joins
                for name in (*join.columns, join.their_time)
                if name
            ),
        }
        for name in self.accept_nulls:
            if name not in there:
                raise InputError(f"--accept-nulls {name}: no such column{nearest(name, there)}")
        base.permit(self.mode, self.store.uri, partitioned=self.spec.table.partition is not None)
        if base.version is not None:
            table = FeatureTable.open(self.store.uri, base.version)
            parent = table.record if table.records else None
        own = self.spec
        if (
            self.mode == "append"
            and parent is not None
            and not placement_of(own.text)
            and (left := placement_of(parent.spec))
        ):
            own = Spec.parse(with_placement(own.text, left), own.name, own.permission)
        if self.refit and (self.mode != "overwrite" or self.reuse_state):
            raise StateError(
                "--refit learns everything anew, and gives every id anew: it goes with --mode overwrite "
                "and all of the input, without --reuse-state"
            )
        if not self.refit and (self.reuse_state or self.update_state or self.mode == "append"):
            # An append that learned anew would give one id to two values.
            before = _state_before(
                own,
                self.store,
                parent.state if parent else None,
                partly=self.update_state and self.mode == "overwrite",
            )
        spec, rule_before = under_rule(own, parent, accept=self.split_moved == "accept")
        if (
            before is not None
            and parent is not None
            and (
                why := why_not(
                    before,
                    parent.spec,
                    spec,
                    mode=self.mode,
                    update=self.update_state,
                    rows_moved=not spec.rule.is_same(parent.identity or spec.rule),
                )
            )
        ):
            raise StateError(
                f"{self.store.uri}: what version {base.version} learned cannot be built on: {why}"
            )
        if parent is not None:
            self._keep_labels_apart(spec, parent, before)
        if self.mode == "append":
            base.permit_append(
                stored_schema(spec.fields({}), partitioned=spec.table.partition is not None),
                self.store.uri,
            )
        for name, value in (
            ("base", base),
            ("parent", parent),
            ("before", before),
            ("spec", spec),
            ("rule_before", rule_before),
        ):
            object.__setattr__(self, name, value)
        self.store.probe()

    def _keep_labels_apart(self, spec: Spec, parent: JobRecord, before: FittedState | None) -> None:
        """Refuses to go on from a version in a way in which a row could meet its own label."""
        if before is not None and (why := why_labels_leak(before, parent, spec)):
            raise StateError(
                f"{self.store.uri}: what version {parent.version} learned from labels cannot be applied "
                f"to these rows, as they could meet their own: {why}; {self._anew(spec)}"
            )

    def _anew(self, spec: Spec) -> str:
        """The command that makes the table anew, in which every id stays."""
        words = [
            "--spec",
            spec.name,
            "--output",
            self.store.uri,
            "--mode",
            "overwrite",
            "--update-state",
        ]
        return f"make it anew from all of its input: sluice etl {shlex.join(words)} --input …"

    def run(self, engine: Engine) -> Result:
        """Makes the version. Until the last line nothing is visible, and after it everything is."""
        try:
            return self._run(engine, engine.progress)
        finally:
            engine.close()

    def _run(self, engine: Engine, progress: JobProgress) -> Result:
        start = time.monotonic()
        engine.check()
        if self.spec.unused:
            progress.say(
                f"note: nothing is made of the input columns {', '.join(self.spec.unused)}"
            )
        learning = self.learns
        named = False
        judged = False
        if self.before is not None and saw_others(self.before, self.spec):
            progress.say(
                f"note: what is applied here was learned from the rows of split {self.before.fitted_on!r}, so "
                "tests on this table may look better than they are; --mode overwrite --refit with all of the "
                f"input learns it from split {self.spec.table.training!r} alone"
            )
        try:
            with progress.stage("fitting" if learning else "counting rows"):
                state, counted = (
                    fit(engine, self.before)
                    if learning
                    else (self.before or FittedState(), count(engine))
                )
            self._judge(engine, counted, progress)
            judged = True
            ways = engine.ways(state)
            for key, way in ways.items():
                progress.say(f"  {key}: {way}")
            with progress.stage(f"writing {counted.rows:,} rows"):
                if self.spec.fitted:
                    state.save(self.store)
                    named = True
                sketches = engine.write(state, counted)
            with progress.stage("checking"):
                record, fields, counted = self._record(engine, state, counted, sketches)
                record = replace(
                    record,
                    took={
                        "rows": counted.parsed,
                        "seconds": round(time.monotonic() - start, 2),
                        "machine": this_machine(),
                        "start_s": round(progress.took.get(STARTING, 0.0), 2),
                    },
                )
                self._compare(record, progress)
                self._warn_of_empty_splits(record, progress)
                self._watch(record, progress)
        except BaseException as error:
            engine.close()
            self._clean()
            if not named:
                self.store.remove(self.files_of_state)
            if judged and not isinstance(
                error, TooManyRejects
            ):  # they are not what it was refused for
                self.store.remove(f"{_REJECTS}/{self.name}")
            raise
        try:
            version = publish(
                self.store, self.base, record, fields
            )  # only the log knows whether it landed
        except CommitConflict:
            self._clean()
            raise
        if self.base.version is None:
            self._remove_refused()
        return Result(
            rows_in=counted.parsed + sum(counted.rejected.values()),
            rows_out=record.rows,
            rejected=counted.rejected,
            version=version,
            fingerprint=Fingerprint.of(fields),
            files=len(record.files),
            splits=_splits(record),
            ways=ways,
            engine=engine.name,
        )

    @property
    def learns(self) -> bool:
        """Whether operators are fitted, and not only those of the version before applied."""
        return self.before is None or self.update_state

    @property
    def named(self) -> str:
        """The input, in messages."""
        return ", ".join(self.inputs)

    @property
    def files_of_state(self) -> str:
        """The folder of vocabularies that this job learns and that are too large to be collected. Once a saved state
        names them, another version may have that state: only vacuum knows who needs them."""
        return f"_sluice/state/{self.name}"

    def _clean(self) -> None:
        """Removes what this job wrote and no reader knows about."""
        self.store.remove(folder_of(self.name))
        self.store.remove(folder_of_tails(self.name))

    def _remove_refused(self) -> None:
        """Removes the rejects of jobs that were refused before this one made the table: they are set right now."""
        jobs = {path.split("/")[2] for path in self.store.files(_REJECTS)} - {self.name}
        for job in filter(re.compile(JOB).fullmatch, jobs):
            self.store.remove(f"{_REJECTS}/{job}")

    def _better(self, reasons: Iterable[str]) -> str:
        """What a spec could say about rows that were rejected for these reasons."""
        said = ["table.unlabelled gives rows without a label a split of their own"] * (
            f"{self.spec.label}: missing" in reasons
        )
        said += ["input.encoding says which bytes a text is of, and `sluice guess` looks"] * any(
            reason.endswith("text") and self.spec.input.format != "json" for reason in reasons
        )
        return "".join(f"; {one}" for one in said)

    def _judge(self, engine: Engine, counted: Counted, progress: JobProgress) -> None:
        """Sets rejects aside, and refuses a job that has too many, or no rows."""
        rejected = sum(counted.rejected.values())
        where = self.rejects or engine.url(f"{_REJECTS}/{self.name}")
        if rejected:
            with progress.stage(f"writing {rejected:,} rejected rows"):
                engine.set_aside(where)
            for reason, times in counted.rejected.items():
                progress.say(f"  {times:,} rejected: {reason}")
        if not counted.parsed + rejected:
            raise InputError(f"{self.named}: holds no rows")
        self._refuse_many(engine, counted, where)
        if len(counted.pairs) > MAX_PAIRS:
            raise InputError(
                f"{self.named}: column {self.spec.table.partition!r} makes {len(counted.pairs):,} "
                f"partitions over all splits, more than {MAX_PAIRS:,}; choose a table.partition of fewer "
                "values"
            )
        if not counted.rows:
            raise InputError(f"{self.named}: no row is left after the spec's filters and samples")
        learns = any(not learned.op.of_all_splits for learned in self.spec.fitted)
        if self.before is None and learns and not counted.training:
            raise InputError(
                f"{self.named}: none of {counted.rows:,} rows lies in split {self.spec.table.training!r}, "
                "from which everything is learned; look at table.split"
            )
        if (
            not self.spec.rows.negatives
            and not self.spec.rows.relational
            and counted.rows < counted.parsed
        ):
            progress.say(
                f"  {counted.parsed - counted.rows:,} rows are left out by filters, a sample, or a "
                "split_column that names no split"
            )
        waiting = (
            [self.spec.label] if self.spec.table.unlabelled else []
        )  # such rows may come at any time
        refuse_lost(self.parent, counted, (*self.accept_nulls, *waiting), progress.say)

    def _refuse_many(self, engine: Engine, counted: Counted, where: str) -> None:
        """Refuses a job with too many rejected rows."""
        rejected = sum(counted.rejected.values())
        total = counted.parsed + rejected
        if rejected > self.max_rejects * total or not counted.parsed:
            raise TooManyRejects(
                f"{rejected:,} of {total:,} rows are rejected, more than --max-rejects "
                f"{self.max_rejects:g} allows ({_most(engine, counted.rejected, where)}); nothing was "
                f"published; rows and reasons are in {where}{self._better(counted.rejected)}"
            )

    def _without_unfit(
        self, engine: Engine, state: FittedState, counted: Counted, rows: int
    ) -> Counted:
        """Sets those rows aside, too, of which the pass that wrote `rows` rows made a number that may not be
        published. Operators have counted them when they learned."""
        where = self.rejects or engine.url(f"{_REJECTS}/{self.name}")
        with engine.progress.stage(f"writing {counted.rows - rows:,} more rejected rows"):
            rejected = dict(sorted(engine.set_aside(where, state).items()))
        for reason, times in rejected.items():
            if more := times - counted.rejected.get(reason, 0):
                engine.progress.say(f"  {more:,} rejected: {reason}")
        late = sum(rejected.values()) - sum(counted.rejected.values())
        # Of the rows that are drawn for others, and are in no file of the input, some may be left out, too.
        kept = rows if self.spec.rows.negatives and late else counted.rows - late
        found = replace(counted, rejected=rejected, parsed=counted.parsed - late, rows=kept)
        self._refuse_many(engine, found, where)
        return found

    def _compare(self, record: JobRecord, progress: JobProgress) -> None:
        """Refuses a version whose test rows were training rows in the one before; warns of rows that are appended
        again."""
        if self.parent is None or self.base.version is None:
            return
        before = SplitRows.of(FeatureTable.open(self.store.uri, self.base.version).records.values())
        now = SplitRows.of([record])
        if (
            self.mode == "append"
            and (again := there_already(before, now, record.rows))
            and again[0]
        ):
            progress.say(
                f"warning: {'' if again[1] else 'about '}{again[0]:,} of the {record.rows:,} rows that are "
                f"appended are in the table already (known by {self.spec.rule.text})"
            )
        try:
            text = trained_on(before.trained, now).text
            what = f"{text} lay in 'train' in version {self.base.version}" if text else ""
        except SplitMoved as unknown:
            what = f"version {record.version}: {unknown}"
        if not what:
            return
        if self.before is not None and not self.before.tables.keys().isdisjoint(
            self.spec.learned_from_labels
        ):
            raise StateError(
                f"{what}, and what was learned from their labels is kept, so they would meet their own; "
                f"nothing was published; {self._anew(self.spec)}"
            )
        if (
            self.split_moved == "refuse"
            and before.rule is not None
            and self.spec.rule.is_same(before.rule)
        ):
            raise SplitMoved(
                f"{what}; nothing was published; cut the splits as before, or accept it with {ACCEPT}"
            )
        progress.say(
            f"warning: {what}; a run that was trained on that goes on here only with {ACCEPT}"
        )

    def _record(
        self,
        engine: Engine,
        state: FittedState,
        counted: Counted,
        sketches: Mapping[str, Mapping[str, Sketch]],
    ) -> tuple[JobRecord, Sequence[Field], Counted]:
        spec = self.spec
        files, profile = describe(
            self.store,
            self.name,
            spec.fields({}),
            spec.table.row_group_rows,
            map_each=engine.each,
            buckets=_buckets(spec),
        )
        rows = sum(f.rows for f in files)
        if rows < counted.rows and any(is_late(column) for column in spec.columns):
            counted = self._without_unfit(engine, state, counted, rows)
        if rows != counted.rows:
            raise CommitError(
                f"{rows:,} rows were written but {counted.rows:,} counted: did the input change "
                "meanwhile? Nothing was published; run it again"
            )
        sizes = cardinalities(spec, state)
        before = self.parent
        old = (
            Profile({name: dict(column) for name, column in before.profile.items()})
            if before
            else Profile()
        )
        lost_before = shares(before.raw_nulls, before.unread) if before else {}
        moved = drift(old, profile, (lost_before, shares(counted.nulls, counted.unread)))
        record = JobRecord(
            job=self.name,
            mode=self.mode,
            version=self.base.next,
            rows=rows,
            files=files,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            state=state.hash if spec.fitted else None,
            parent=before.state if before else None,
            spec=spec.text,
            seed=spec.table.seed,
            cardinalities=sizes,
            rejected=counted.rejected,
            bags=profile.bags,
            profile=profile.columns,
            raw_nulls=counted.nulls,
            unread=counted.unread,
            drift=moved,
            tails=self.spec.rows.looks_back,
            identity=spec.rule,
            engine=engine.name,
            sketches={
                recognition: {split: sketch.to_json() for split, sketch in splits.items()}
                for recognition, splits in sketches.items()
            },
        )
        return record, spec.fields(sizes, profile.bags), counted

    def _warn_of_empty_splits(self, record: JobRecord, progress: JobProgress) -> None:
        """Says which splits of the version that is made have no rows; an append may leave some to the parts before."""
        rows = _splits(record)
        if self.mode == "append" and self.base.version is not None:
            for file in FeatureTable.open(self.store.uri, self.base.version).files:
                rows[file.split] = rows.get(file.split, 0) + file.rows
        for text in empty_splits(self.spec.table, rows):
            progress.say(f"warning: {text}")

    def _watch(self, record: JobRecord, progress: JobProgress) -> None:
        """Warns of drift, or refuses it, as the spec says."""
        for kind, (warn, refuse) in self.spec.drift.items():
            for name, moved in record.drift.items():
                size = abs(moved[kind])
                what = f"drift: {kind} of column {name!r} is {moved[kind]:g} against the version before"
                if refuse is not None and size >= refuse:
                    raise DriftError(
                        f"{what}, and drift.{kind}.refuse = {refuse:g}; nothing was published"
                    )
                if warn is not None and size >= warn:
                    progress.say(f"warning: {what} (drift.{kind}.warn = {warn:g})")


def _splits(record: JobRecord) -> dict[str, int]:
    found: dict[str, int] = {}
    for file in record.files:
        found[file.split] = found.get(file.split, 0) + file.rows
    return found


def _most(engine: Engine, rejected: Mapping[str, int], where: str) -> str:
    """Names the most frequent reason, with a row that was rejected for it."""
    reason = max(rejected, key=lambda r: rejected[r])
    row = engine.reject(where, reason)
    if row is None:
        return f"most often: {reason}"
    line = "" if row.line is None else f", line {row.line}"
    place = "" if row.file is None else f" in {row.file}{line}"
    return f"most often: {reason}; for instance{place}: {row.raw[:_SHOWN]!r}"


def _buckets(spec: Spec) -> dict[str, int]:
    """The number of ids of each column that stand for values out of its vocabulary."""
    return {c.name: getattr(op, "oov") for c in spec.columns for op in c.ops if hasattr(op, "oov")}  # noqa: B009


def _state_before(
    spec: Spec, store: TableStore, name: str | None, *, partly: bool = False
) -> FittedState:
    """The table's fitted state, if it belongs to this spec; with `partly`, only what this spec learns in the same way,
    so that columns may be added and dropped while the others keep their ids. What was learned from labels is then
    left out: it gives no ids, and learned anew it holds each row in the fold that the row has now."""
    if not spec.fitted:
        return FittedState(spec=spec.fitted_hash)
    if name is None:
        raise StateError(f"{store.uri}: there is no fitted state to reuse; leave out --reuse-state")
    state = FittedState.load(store, name)
    for stored in state.stored.values():
        stored.check()  # an engine may read the files by itself, without a check
    if partly:
        chains = json.loads(json.dumps(spec.chains))  # in the form that a stored state has
        same = {
            key: table
            for key, table in state.tables.items()
            if state.chains.get(key) == chains.get(key) and key not in spec.learned_from_labels
        }
        return FittedState(
            spec=spec.fitted_hash, tables=same, chains=spec.chains, fitted_on=state.fitted_on
        )
    if state.spec != spec.fitted_hash:
        raise StateError(
            f"{store.uri}: its fitted state is another spec's: {_difference(state.chains, spec.chains)}; "
            "columns come and go by --mode overwrite --update-state with all of the input, old and new, "
            "which keeps every id that was given"
        )
    return state


def _difference(have: Mapping[str, Any], want: Mapping[str, Any]) -> str:
    """Names the first of the things that two specs learn differently."""
    for key in sorted(have.keys() | want.keys()):
        if key not in want or key not in have:
            return f"{key} is {'not in this spec' if key in have else 'only in this spec'}"
        if have[key] != want[key]:
            return (
                f"{key} was learned by {_words(have[key])}, and is {_words(want[key])} in this spec"
            )
    return "its columns differ"


def _words(users: Any) -> str:
    return "; ".join(f"{' × '.join(sources)}: {ops}" for sources, ops in users)
