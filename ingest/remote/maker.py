"""`job_of` describes a loader's job. Loader and worker both call it, so any difference between them is found.
`UnitMaker` makes the units of a job on a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.schema import digest
from sluice.ingest.choices import History
from sluice.ingest.flow.decoded import Decoded, ReadTask
from sluice.ingest.flow.placer import Placer
from sluice.ingest.loader_config import LoaderConfig
from sluice.ingest.loader_input import LoaderInput, open_input
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge, Governor
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.sources import Reading
from sluice.ingest.remote.messages import RemoteError
from sluice.ingest.remote.unit import Part, RemoteJob, Unit
from sluice.ingest.row_order import EpochSchedule, Order, Read, Slice, Window

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable


def job_of(given: LoaderInput) -> RemoteJob:
    """Describes a loader's job, as seen from this side."""
    source, config, columns = given.table, given.config, given.columns
    plain = source if isinstance(source, ParquetFiles) else None
    if plain and plain.spec is not None:
        raise RemoteError(
            f"{source.uri}: remote workers do not read plain Parquet with a spec; give roles, or "
            "make a feature table of it"
        )
    kinds = dict.fromkeys(columns.floats, "float32") | {
        name: columns.value_kind(name).__name__ for name in (*columns.scalars, *columns.bags)
    }
    stored = {name: kind for name, kind in kinds.items() if name not in columns.added}
    made: Sequence[Any] = (
        [recipe.described for recipe in plain.recipes if recipe.name in stored]
        if plain
        else [[f.name, list(f.online)] for f in source.fields if f.online and f.name in stored]
    )
    roles: dict[str, list[str]] = {}
    for recipe in plain.recipes if plain else ():
        roles.setdefault(recipe.role, []).append(recipe.name)
    # Hosts may have the files at different paths.
    files = [
        [file.path.rpartition("/")[2].partition("?")[0], file.bytes, file.content]
        for file in source.files_of(config.split)
    ]
    history = config.history
    return RemoteJob(
        version=str(source.version),
        files=digest(files),
        split=config.split,
        roles=roles,
        hash=dict(plain.hash) if plain else {},
        batch_size=config.batch_size,
        seed=config.seed,
        order=asdict(config.order),
        plan=given.plan.digest,
        columns=stored,
        bags={name: columns.bags[name] for name in columns.stored_bags},
        fill=dict(columns.fill),
        history=asdict(history) if history else None,
        made=digest(made),
    )


class UnitMaker:
    """Makes the units of one job. Many threads can use it. A unit has the same rows each time."""

    def __init__(
        self,
        job: RemoteJob,
        source: FeatureTable | ParquetFiles,
        governor: Governor | None = None,
    ):
        """The `governor` admits units within a memory limit. None: there is no limit."""
        self.job = job
        if not isinstance(source, ParquetFiles):
            # The loader's transforms may add columns. The job lists only those that files hold.
            fields = tuple(field for field in source.fields if field.name in job.columns)
            source = replace(source, fields=fields, transforms=())
        given = open_input(
            LoaderConfig(
                source=source,
                batch_size=job.batch_size,
                split=job.split,
                seed=job.seed,
                order=Order(**job.order),
                reading=Reading(
                    reader="arrow"
                ),  # the same rows, and Petastorm takes 0.3 s to import
                fill=job.fill,
                history=History(**job.history) if job.history else None,
            )
        )
        self._groups, columns = given.groups, given.columns
        self._check(source, job_of(given))
        self._placer = Placer(given.plan, columns, self._groups.describe, Buffers())
        self._row_bytes = columns.row_bytes
        self._governor = governor or Governor(2**62, 0)
        self._room = threading.Condition(self._governor.lock)
        self._throttled = 0

    def _check(self, source: FeatureTable | ParquetFiles, own: RemoteJob) -> None:
        """Raises RemoteError if this side finds another job than the loader sent."""
        here, there = own.values, self.job.values
        if wrong := "; ".join(
            f"{name}: {there[name]!r} there, {here[name]!r} here"
            for name in here
            if here[name] != there[name]
        ):
            raise RemoteError(
                f"{source.uri}: this worker sees another table or plan than the loader ({wrong})"
            )

    def rows(self, unit: Unit) -> pa.RecordBatch:
        """Returns the rows of a unit's parts, one part after the other, as batches hold them."""
        try:
            rows = self._groups.row_groups[unit.file][unit.group]
        except IndexError:
            rows = -1
        if not unit.parts or any(not part.start <= part.stop <= rows for part in unit.parts):
            raise RemoteError(f"{unit.description}: the table has no such rows")
        read = Read(unit.file, unit.group, rows, ())
        task = ReadTask(EpochSchedule(unit.epoch, 0, (), (), ()), read)
        size = self._groups.decoding.at_work(rows) + unit.rows * self._row_bytes
        with self._admitted(size) as charge:
            decoded = Decoded(task, self._groups.read(read), charge)
            parts = [(part.start, part.stop, _window_of(unit, part)) for part in unit.parts]
            return self._placer.gather(decoded, parts, unit.epoch)

    def count_throttled(self) -> int:
        """Returns how many requests the table's store has refused since the last call."""
        with self._governor.lock:
            before, self._throttled = self._throttled, self._groups.stats().get("throttled", 0)
            return self._throttled - before

    @contextmanager
    def _admitted(self, size: int) -> Iterator[Charge]:
        """Waits until `size` bytes fit into the memory limit. If no other unit is being made, it does not wait."""
        governor = self._governor
        again = False
        with governor.lock:
            while (charge := governor.admit(size, due=not governor.charged)) is None:
                governor.wait_on(self._room, again)
                again = True
        try:
            yield charge
        finally:
            charge.release()

    def close(self) -> None:
        self._groups.close()


def _window_of(unit: Unit, part: Part) -> Window | None:
    """Returns the window that a part is. None: it is not a whole one."""
    rows = (Slice(unit.file, unit.group, part.start, part.stop),)
    return Window(part.stream, part.window, 0, rows) if part.full else None
