"""A job from beginning to end: `Job` checks what it can without Spark, then `run` makes and publishes a version."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etl.commit import Base, CommitError, arrow_schema, describe, folder_of, new_job, publish
from etl.features import Placement, cardinalities
from etl.fields import Fingerprint
from etl.fit import Counted, InputError, Raw, count, fit, write, write_rejects
from etl.progress import Progress
from etl.record import JobRecord
from etl.spec import Spec
from etl.state import State, StateError
from etl.store import Store
from etl.table import FeatureTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_REJECTS = 0.01


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a job did."""

    rows_in: int
    rows_out: int
    rejected: Mapping[str, int]
    version: int
    fingerprint: Fingerprint
    files: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, on the version that the table has when it is made; wrong requests are refused at once."""

    spec: Spec
    inputs: tuple[str, ...]
    store: Store
    mode: str = "create"
    rejects: str | None = None
    """Where rejected rows go; None: beside the table."""
    max_rejects: float = MAX_REJECTS
    reuse_state: bool = False
    name: str = field(default_factory=new_job)
    base: Base = field(init=False)
    parent: str | None = field(init=False)
    """Hash of the fitted state that the version before has."""
    reused: State | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        base, parent, reused = Base.read(self.store), None, None
        base.permit(self.mode, self.store.uri)
        if base.version is not None:
            parent = FeatureTable.open(self.store.uri, base.version).record.state
        if self.reuse_state or self.mode == "append":  # an append that learned anew would give one id two values
            reused = _state_to_reuse(self.spec, self.store, parent)
        for name, value in (("base", base), ("parent", parent), ("reused", reused)):
            object.__setattr__(self, name, value)
        self.store.probe()

    def run(self, spark: SparkSession, progress: Progress) -> Result:
        """Makes the version. Until the last line nothing is visible, and after it everything is."""
        progress.follow(spark)
        raw = Raw(spark, self.spec, self.inputs)
        with progress.stage("fitting" if self.reused is None else "counting rows"):
            state, counted = fit(raw) if self.reused is None else (self.reused, count(raw))
        self._judge(raw, counted, progress)
        fields = self.spec.fields(cardinalities(self.spec, state))
        try:
            with progress.stage(f"writing {counted.rows:,} rows"):
                if self.spec.fitted:
                    state.save(self.store)
                write(raw, state, Placement.of(self.spec, counted.rows), self.store.url(folder_of(self.name)))
            with progress.stage("checking"):
                record = self._record(state, counted)
        except BaseException:
            self.store.remove(folder_of(self.name))  # no reader knows of it
            raise
        version = publish(self.store, self.base, record, fields)  # from here on, only the log knows whether it landed
        return Result(rows_in=counted.rows + sum(counted.rejected.values()), rows_out=record.rows,
                      rejected=counted.rejected, version=version, fingerprint=Fingerprint.of(fields),
                      files=len(record.files))

    def _judge(self, raw: Raw, counted: Counted, progress: Progress) -> None:
        """Sets rejects aside, and refuses a job that has too many, or no rows."""
        rejected = sum(counted.rejected.values())
        where = self.rejects or self.store.url(f"_sluice/rejects/{self.name}")
        if rejected:
            with progress.stage(f"setting {rejected:,} rejected rows aside"):
                write_rejects(raw, where)
            for reason, times in counted.rejected.items():
                progress.say(f"  {times:,} rejected: {reason}")
        total = counted.rows + rejected
        if not total:
            raise InputError(f"{', '.join(self.inputs)}: holds no rows")
        if rejected > self.max_rejects * total or not counted.rows:
            raise InputError(f"{rejected:,} of {total:,} rows do not parse, more than --max-rejects "
                             f"{self.max_rejects:g} allows; nothing was published; rows and reasons are in {where}")

    def _record(self, state: State, counted: Counted) -> JobRecord:
        spec = self.spec
        files = describe(self.store, self.name, arrow_schema(spec.fields({})), spec.table.row_group_rows)
        rows = sum(f.rows for f in files)
        if rows != counted.rows:
            raise CommitError(f"{rows:,} rows were written but {counted.rows:,} counted: did the input change "
                              "meanwhile? Nothing was published; run it again")
        return JobRecord(job=self.name, mode=self.mode, version=self.base.next, rows=rows, files=files,
                         at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                         state=state.hash if spec.fitted else None, parent=self.parent, spec=spec.text,
                         seed=spec.table.seed, cardinalities=cardinalities(spec, state), rejected=counted.rejected)


def _state_to_reuse(spec: Spec, store: Store, name: str | None) -> State:
    """The table's fitted state, if it is this spec's."""
    if not spec.fitted:
        return State(spec=spec.fitted_hash)
    if name is None:
        raise StateError(f"{store.uri}: there is no fitted state to reuse; leave out --reuse-state")
    state = State.load(store, name)
    if state.spec != spec.fitted_hash:
        raise StateError(f"{store.uri}: its fitted state is another spec's (hash {state.spec}, this one's is "
                         f"{spec.fitted_hash}); use --mode overwrite without --reuse-state")
    return state
