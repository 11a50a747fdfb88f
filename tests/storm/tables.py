"""One run of a table in a storm: jobs that publish, a vacuum, readers that hold a version; on real files, with
delta-rs's own commits. What must hold: a version is there whole or not at all, and is what the jobs that were told it
landed make of it; who was overtaken is told so; and what a reader holds stays whole for as long as it holds it."""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from deltalake import DeltaTable

from sluice import FeatureTable
from sluice.etl.table import commit
from sluice.etl.table.job_record import FileRecord
from sluice.etl.table.new_files import CommitError
from tests.product import (
    Base,
    CommitConflict,
    Field,
    JobRecord,
    PinKeeper,
    StoreError,
    TableError,
    TableStore,
    vacuum,
)
from tests.storm.scheduler import Crew, Deviation, Ended, Scheduler, Way
from tests.storm.steps import full_disk
from tests.storm.threads import EPOCH_S, Thread, Time, entered

_FIELDS = (
    Field(name="label", role="label", type="int8"),
    Field(name="x", role="dense", type="float"),
)
_DAY_S = 86_400.0
_OLD_S = 40 * _DAY_S
_GRACE_S = 10_000.0  # more than any run takes


@dataclass(frozen=True)
class Plans:
    """What a seed draws."""

    before: int
    """Versions that are there, all of them long ago."""
    jobs: tuple[str, ...]
    """Modes of the jobs: `append` with what the table has learned, `update` with what the job learned, `overwrite`."""
    vacuums: int
    keep: int
    readers: int
    full: float
    """The share of writes for which there is no room."""
    kills: int

    @classmethod
    def draw(cls, chance: Random) -> Plans:
        return cls(
            before=chance.randint(1, 3),
            jobs=tuple(
                chance.choice(("append", "append", "update", "overwrite"))
                for _ in range(chance.choice((0, 1, 2, 2)))
            ),
            vacuums=chance.choice((0, 1, 1)),
            keep=chance.randint(1, 2),
            readers=chance.randint(0, 2),
            full=chance.choice((0.0, 0.0, 0.0, 0.05)),
            kills=chance.choice((0, 0, 0, 1)),
        )


@dataclass
class World:
    """The disk, and what was done to it."""

    run: Scheduler
    full: float
    modified: dict[str, float] = field(default_factory=dict)
    kills: int = 0
    refused: int = 0
    conflicts: int = 0
    landed: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Job → the version that it was told it made, and its mode."""

    def before_writing(self) -> None:
        if self.full and self.run.chance.random() < self.full:
            self.refused += 1
            raise full_disk()


Bend = Callable[[Plans], Plans]


def run_table(
    chance: Random, crew: Crew, traced: Any, bend: Bend = lambda plans: plans
) -> Scheduler:
    """One run; raises what it finds. `bend` changes what is drawn."""
    plans = bend(Plans.draw(chance))
    way = replace(Way.draw(chance, lines=False), switch=chance.choice((0.1, 0.3, 0.6)))
    run = Scheduler(chance, way, crew, traced)
    run.case = plans
    with tempfile.TemporaryDirectory(prefix="sluice-storm-") as folder, entered(run):
        try:
            _Run(plans, run, Path(folder) / "table").go()
            run.finish()
        except Ended:
            raise run.failure or Deviation("the run was ended") from None
    return run


class _Run:
    def __init__(self, plans: Plans, run: Scheduler, folder: Path):
        self._plans, self._run, self._store = plans, run, TableStore(folder)
        self._world = run.world = World(run, 0.0)
        self._jobs = 0
        for number in range(plans.before):
            self._publish(
                ("create", "append", "overwrite")[number and run.chance.randint(1, 2)], -_OLD_S
            )
        self._world.full = plans.full

    def go(self) -> None:
        plans = self._plans
        threads = [
            Thread(target=lambda mode=mode: self._job(mode), name=mode) for mode in plans.jobs
        ]
        threads += [Thread(target=self._vacuum, name="vacuum") for _ in range(plans.vacuums)]
        threads += [
            Thread(target=lambda n=n: self._read(n), name=f"reader {n}")
            for n in range(plans.readers)
        ]
        for thread in threads:
            thread.start()
        for _ in range(plans.kills):
            Time.sleep(self._run.chance.random() * 3)
            victim = threads[int(self._run.chance.random() * len(threads))] if threads else None
            if victim is not None and victim.task is not None and not victim.task.ended:
                self._world.kills += 1
                self._run.kill(victim.task)
        for thread in threads:
            thread.join()
        self._world.full = 0.0
        self._versions()

    # ---- who works on it

    def _job(self, mode: str) -> None:
        self._later()
        try:
            self._publish(mode, 0.0)
        except CommitConflict:
            self._world.conflicts += 1
        except OSError as error:
            if not self._world.full:
                raise Deviation(f"a job ended by {error}") from error
        except (TableError, CommitError, StoreError) as error:
            if not self._world.full:
                raise Deviation(f"a job ended by {error}") from error

    def _publish(self, mode: str, age_s: float) -> None:
        store, learns = self._store, mode in ("update", "overwrite", "create")
        self._jobs += 1
        at = datetime.datetime.fromtimestamp(
            EPOCH_S + self._run.now + age_s + self._jobs, datetime.UTC
        )
        job = f"{at:%Y%m%dT%H%M%S}-{self._jobs:08x}"
        base = Base.read(store)
        told = "append" if mode == "update" else mode
        base.permit(told, store.uri)
        parent = (
            None
            if base.version is None
            else FeatureTable.open(store.uri, base.version).record.state
        )
        state = f"{self._jobs:016x}" if learns else parent
        files = tuple(
            FileRecord(
                path=f"data/{job}/split=train/part-{n}.parquet",
                rows=1,
                bytes=len(job),
                split="train",
                row_group_rows=(1,),
                sha256="",
            )
            for n in range(self._run.chance.randint(1, 2))
        )
        written = [f.path for f in files] + (
            [f"_sluice/state/{state}/state.json"] if learns else []
        )
        about = json.dumps(
            {"spec": "", "fitted_on": "train", "keys": [], "chains": {}, "stored": {}}
        )
        for path in written:
            store.write(path, (about if path.endswith("state.json") else job).encode())
            self._world.modified[path] += age_s
        record = JobRecord(
            job=job,
            mode=told,
            version=base.next,
            at=f"{at:%FT%TZ}",
            rows=len(files),
            state=state,
            parent=parent,
            spec="",
            seed=0,
            files=files,
            cardinalities={},
        )
        version = commit.publish(store, base, record, _FIELDS)
        self._world.modified[f"_sluice/jobs/{job}.json"] += age_s
        self._world.landed[job] = version, told

    def _later(self) -> None:
        """At the same time as others, or some while after them."""
        if self._run.chance.random() < 0.5:
            Time.sleep(self._run.chance.random())

    def _vacuum(self) -> None:
        self._later()
        try:
            vacuum(self._store, keep=self._plans.keep, now=Time.time(), grace_s=_GRACE_S)
        except OSError as error:
            if not self._world.full:
                raise Deviation(f"vacuum ended by {error}") from error

    def _read(self, number: int) -> None:
        """What a trainer does: opens the newest version, holds it, looks whether it is whole, and reads it."""
        self._later()
        said: list[str] = []
        with PinKeeper(f"reader-{number}", said.append) as hold:
            try:
                table = FeatureTable.open(self._store.uri)
                hold.take(table.uri, table.version)
            except (StoreError, TableError):
                return  # told before it begins: its version was given up before it was held
            if said or self._missing(table):
                return  # likewise
            for _ in range(3):
                Time.sleep(self._run.chance.random())
                if missing := self._missing(table):
                    raise Deviation(
                        f"version {table.version} lost {missing} while reader {number} held it"
                    )

    def _missing(self, table: FeatureTable) -> list[str]:
        """What is not there of a version, or is not what its job wrote."""
        paths = [
            (self._store.relative(f.path), f.path.split("/data/")[1].split("/")[0])
            for f in table.files
        ]
        paths += [
            (f"_sluice/state/{r.state}/state.json", "") for r in table.records.values() if r.state
        ]
        missing = []
        for path, job in paths:
            try:
                content = self._store.read(path).decode()
            except FileNotFoundError:
                missing.append(path)
                continue
            if job and content != job:
                missing.append(f"{path} ({content})")
        return missing

    # ---- what is left

    def _versions(self) -> None:
        """Each version is what the jobs that landed make of it, in their order."""
        newest = FeatureTable.open(self._store.uri)
        history = {v["version"]: v.get("job") for v in _history(self._store)}
        told = {version: job for job, (version, _) in self._world.landed.items()}
        for version, job in told.items():
            if history.get(version) != job:
                raise Deviation(
                    f"job {job} was told that it made version {version}, which {history.get(version)} made"
                )
        if len(told) != len(self._world.landed):
            raise Deviation(
                f"two jobs were told that they made the same version: {self._world.landed}"
            )
        untold = set(history) - set(told)
        if len(untold) > self._world.kills + self._world.refused:
            raise Deviation(f"versions {untold} were made by nobody")
        files: list[str] = []
        states: dict[int, str | None] = {}
        for version in range(newest.version + 1):
            job = history[version]
            try:
                record = JobRecord.from_json(self._store.read_json(f"_sluice/jobs/{job}.json"))
            except FileNotFoundError:
                files, states[version] = [], None  # given up
                continue
            if record.mode == "append" and states.get(version - 1) not in (None, record.parent):
                raise Deviation(
                    f"version {version} adds what was made with state {record.parent} to version "
                    f"{version - 1}, which has {states[version - 1]}"
                )
            states[version] = record.state
            own = [f.path for f in record.files]
            complete = record.mode != "append" or files
            files = [*files, *own] if record.mode == "append" else own
            try:
                table = FeatureTable.open(self._store.uri, version)
            except TableError as error:
                if version == newest.version:
                    raise Deviation(f"the newest version cannot be read: {error}") from None
                continue
            if complete and sorted(self._store.relative(f.path) for f in table.files) != sorted(
                files
            ):
                raise Deviation(
                    f"version {version} has {[f.path for f in table.files]} where its jobs wrote {files}"
                )
            if version == newest.version and (missing := self._missing(table)):
                raise Deviation(f"the newest version lacks {missing}")


def _history(store: TableStore) -> list[dict[str, Any]]:
    return DeltaTable(**store.delta).history()
