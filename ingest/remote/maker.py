"""`job_of` describes a loader's job. Loader and worker both call it, so any difference between them is found.
`UnitMaker` makes the units of a job on a worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.schema import digest
from sluice.ingest.choices import History
from sluice.ingest.columns import Columns
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge, Governor
from sluice.ingest.read.parquet_files import ParquetFiles, located_of
from sluice.ingest.read.reader import RowGroupReader, Work
from sluice.ingest.read.user_history import histories_of
from sluice.ingest.remote.unit import RemoteError, RemoteJob, Unit, package
from sluice.ingest.row_order import EpochSchedule, Read, RowsPlan, Slice, Window, WindowPart
from sluice.ingest.stages.scatter_kernel import load_compiled
from sluice.ingest.stages.shuffle import Chunks, Decoded, Gatherer, ReadTask, WindowPiece
from sluice.ingest.stages.table_operators import Operators

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

_PLAN = ("batch_size", "seed", "streams", "window_rows", "shuffle", "last")


def job_of(
    source: FeatureTable | ParquetFiles,
    *,
    plan: RowsPlan,
    split: str,
    columns: Columns,
    sample: str | None,
    history: History | None = None,
) -> RemoteJob:
    """Describes a loader's job, as seen from this side."""
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
        for file in source.files_of(split)
    ]
    return RemoteJob(
        package=package(),
        version=str(source.version),
        files=digest(files),
        split=split,
        sample=sample,
        roles=roles,
        hash=dict(plain.hash) if plain else {},
        order=plan.digest,
        plan={name: getattr(plan, name) for name in _PLAN},
        columns=stored,
        bags={name: columns.bags[name] for name in columns.stored_bags},
        fill=dict(columns.fill),
        history={**asdict(history), "columns": list(history.columns)} if history else None,
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
        plain = source if isinstance(source, ParquetFiles) else None
        # The loader's transforms may add columns. The job lists only those that files hold.
        fields = tuple(f for f in source.fields if f.name in job.columns)
        operators = Operators(fields, source.state() if any(f.online for f in fields) else None)
        columns = operators.filled(Columns.of(fields, job.fill, job.bags))
        made = plain.made(job.split, columns.names) if plain else operators.made(columns)
        history = History(**job.history) if job.history else None
        histories = histories_of(history, source, job.split, columns, operators)
        files = source.files_of(job.split)
        self._groups = groups = RowGroupReader(
            files,
            made.sources if made else columns.names,
            bags=columns.bags,
            made=made,
            sample=job.sample,
            located=located_of(source),
            history=histories,
            ids=columns.foreign_ids,
        )
        if histories is not None:
            columns = histories.columns
        self._plan = plan = RowsPlan(
            groups=groups.row_groups, chances=groups.chances() if job.sample else (), **job.plan
        )
        self._check(
            source,
            job_of(
                source,
                plan=plan,
                split=job.split,
                columns=columns,
                sample=job.sample,
                history=history,
            ),
        )
        chunks = Chunks(plan, columns, 1, Buffers())
        self._gatherer: Callable[[], Gatherer] = lambda: Gatherer(
            plan, columns, chunks, groups.describe
        )
        load_compiled(bags=bool(columns.stored_bags))
        self._idle: deque[tuple[Work, Gatherer]] = deque()
        self._row_bytes = columns.row_bytes
        self._governor = governor or Governor(2**62, 0)
        self._room = threading.Condition(self._governor.lock)

    def _check(self, source: FeatureTable | ParquetFiles, own: RemoteJob) -> None:
        """Raises RemoteError if this side finds another job than the loader sent."""
        here, there = asdict(own), asdict(self.job)
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
        groups = self._plan.groups
        rows = (
            groups[unit.file][unit.group]
            if unit.file < len(groups) and unit.group < len(groups[unit.file])
            else -1
        )
        if (
            any(not part.start <= part.stop <= rows for part in unit.parts)
            or rows < 0
            or not unit.parts
        ):
            raise RemoteError(f"{unit.description}: the table has no such rows")
        read = Read(
            unit.file,
            unit.group,
            rows,
            tuple(WindowPart(n, 0, p.start, p.stop) for n, p in enumerate(unit.parts)),
            unit.draw,
        )
        try:
            work, gatherer = self._idle.pop()
        except IndexError:
            work, gatherer = self._groups.make_work(), self._gatherer()
        size = self._groups.decoding.at_work(rows) + unit.rows * self._row_bytes
        with self._admitted(size) as charge:
            decoded = work(ReadTask(EpochSchedule(unit.epoch, 0, (), (), ()), read), charge)
            found = self._gather(unit, decoded, gatherer)
        self._idle.append((work, gatherer))
        return [*pa.Table.from_batches(found).combine_chunks().to_batches(), *found][0]

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

    @staticmethod
    def _gather(unit: Unit, decoded: Decoded, gatherer: Gatherer) -> list[pa.RecordBatch]:
        """Returns a batch for each part of the unit."""
        found = []
        for part in unit.parts:
            window = Window(
                part.stream, part.window, 0, (Slice(unit.file, unit.group, part.start, part.stop),)
            )
            found.append(
                gatherer.gather_piece(
                    WindowPiece(decoded, part.start, part.stop),
                    unit.epoch,
                    window if part.full else None,
                )
            )
        return found

    def close(self) -> None:
        self._groups.close()
