"""The loader of one rank: `BatchLoader`. `sluice.Loader` is this one with an agent in it."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from sluice.etl.schema import DataFile, Field, Fingerprint
from sluice.etl.spec.permission import Permission
from sluice.ingest.batch import Batch
from sluice.ingest.column_transforms import bound
from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoadingError
from sluice.ingest.knobs import Knobs, Limits, format_bytes
from sluice.ingest.machine import Machine
from sluice.ingest.pipeline import Pipeline, PipelineParts
from sluice.ingest.process.worker import WorkerClosed
from sluice.ingest.progress import Progress
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.packed_copy import PackedCopy
from sluice.ingest.read.parquet_files import ParquetFiles, table_of
from sluice.ingest.read.petastorm.options import PetastormOptions, reshaped, without_spec
from sluice.ingest.read.reader import RowGroupReader, RowGroupSource, SourceError, first_schema
from sluice.ingest.read.sources import source_of
from sluice.ingest.row_order import (
    WINDOW_ROWS,
    Position,
    RankShare,
    Read,
    RowsPlan,
    chain,
    default_streams,
)
from sluice.ingest.stages.batch import Ready
from sluice.ingest.stages.pool import Closed
from sluice.ingest.stages.quarantine import Errors, Origins, Quarantine, RowQuarantine
from sluice.ingest.stages.scatter_kernel import converted
from sluice.ingest.stages.table_operators import Operators
from sluice.ingest.stages.transform import (
    Transform,
    UserTransform,
    address_of,
    fused,
    transforms_of,
)
from sluice.ingest.stats import Snapshot

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.parquet_files import Paths, Roles

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class LoaderError(LoadingError):
    """A loader cannot do what was asked. The message says what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """The rows to load, and what makes batches of them."""

    source: FeatureTable | ParquetFiles
    files: Sequence[DataFile]
    """The files of the split."""
    opener: FileOpener
    fields: Sequence[Field]
    """The columns, after a TransformSpec among the transforms."""
    layout: str
    """The fingerprint of these columns."""
    petastorm: PetastormOptions
    transforms: Sequence[Transform]
    """The transforms of the table's spec, then the user's."""
    code: Mapping[str, str | None]
    """Each transform's name, and `module:function` if it can be imported."""

    @property
    def plain(self) -> ParquetFiles | None:
        return self.source if isinstance(self.source, ParquetFiles) else None

    def operators(self) -> Operators:
        """Returns the operators that the table leaves to the loader."""
        source = self.source
        spec = "" if isinstance(source, ParquetFiles) or not source.records else source.record.spec
        state = source.state() if any(field.online for field in self.fields) else None
        return Operators(self.fields, state, spec)

    def columns(self, fill: Mapping[str, float] | float | None, operators: Operators) -> Columns:
        """Returns the columns of a batch."""
        plain = self.plain
        if plain is None:
            return operators.filled(Columns.of(self.fields, fill))
        columns = operators.filled(Columns.of(self.fields, fill, plain.bags, plain.fill))
        if not self.petastorm.asked_for:  # Petastorm may change values and skip rows
            plain.check(columns)
        return columns

    def row_groups(
        self,
        columns: Columns,
        operators: Operators,
        *,
        split: str,
        sample: str | None,
        packed: PackedCopy | None,
        before_read: Callable[[Read], None] | None,
    ) -> RowGroupReader:
        """Returns what reads row groups."""
        plain = self.plain
        made = plain.made(split, columns.names) if plain else operators.made(columns)
        names: Sequence[str] = made.sources if made else columns.names
        given = None
        if self.petastorm.transform_spec is not None or self.petastorm.predicate is not None:
            names, given = self.petastorm.columns(names, first_schema(self.files, self.opener))
        return RowGroupReader(
            self.files,
            names,
            before_read,
            self.opener,
            bags=columns.bags,
            sample=sample,
            given=given,
            made=made,
            packed=packed,
        )


def _open_input(
    source: FeatureTable | ParquetFiles | Paths,
    *,
    split: str,
    roles: Roles | None,
    transforms: Iterable[UserTransform],
    petastorm: PetastormOptions,
    sample: str | None,
    opener: FileOpener,
    allow_code: Permission | Iterable[str],
) -> _Input:
    transforms, transform_spec = without_spec(transforms)
    table = table_of(source, roles, allow_code, transform_spec=transform_spec)
    own = transforms_of(transforms)
    code = {transform.name: transform.code for transform in own}
    files = table.files_of(split)
    fields: Sequence[Field] = table.fields
    if transform_spec is not None:
        petastorm = replace(petastorm, transform_spec=transform_spec)
        code = {"TransformSpec": address_of(transform_spec.func), **code}
        if not isinstance(table, ParquetFiles):
            fields = reshaped(fields, first_schema(files, opener), transform_spec)
    if sample is not None and petastorm.asked_for:
        raise LoaderError(
            f"sample={sample!r} with {', '.join(petastorm.asked_for)}: rows are sampled as they are "
            "stored. Make a column with the weights of the remaining rows, and sample by that column"
        )
    return _Input(
        source=table,
        files=files,
        opener=opener,
        fields=fields,
        layout=table.fingerprint.layout
        if transform_spec is None
        else Fingerprint.of(fields).layout,
        petastorm=petastorm,
        transforms=[*bound(table.transforms, table.stored, table.permission), *own],
        code=code,
    )


class BatchLoader(IterableDataset[Batch]):
    """Batches of a table for one rank, in an order that depends on (table version, seed, epoch) alone.

        with BatchLoader(FeatureTable.open("table"), batch_size=8192) as loader:
            for epoch in range(3):
                for batch in loader:
                    ...

    `sluice.Loader` is this loader with an agent that tunes it, and documents the arguments. Arguments of its `order`
    and `reading` are given here one by one. `epochs` limits read-ahead over the end of an epoch. `memory_limit` is in
    bytes. `before_read` runs in the reader before each row group, to imitate a store's latency.
    """

    def __init__(
        self,
        source: FeatureTable | ParquetFiles | Paths,
        *,
        batch_size: int,
        split: str = "train",
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        epochs: int = 1,
        knobs: Knobs | None = None,
        shuffle: bool = True,
        streams: int | None = None,
        window_rows: int | None = None,
        last: str = "drop",
        sample: str | None = None,
        memory_limit: int | None = None,
        reader: str | None = None,
        petastorm: PetastormOptions = PetastormOptions(),
        transforms: Iterable[UserTransform] = (),
        roles: Roles | None = None,
        fill: Mapping[str, float] | float | None = None,
        errors: Errors = Errors(),
        files: FileOpener | None = None,
        packed: PackedCopy | None = None,
        workers: str | None = None,
        before_read: Callable[[Read], None] | None = None,
        machine: Machine | None = None,
        allow_code: Permission | Iterable[str] = (),
    ):
        if epochs < 1:
            raise LoaderError(f"epochs to read ahead: {epochs} is not a positive number")
        if sample is not None and errors.on_error != "raise":
            raise LoaderError(
                f"sample={sample!r} with on_error={errors.on_error!r}: a drawn row cannot be traced to one "
                "row of the table. Use on_error='raise'"
            )
        self._machine = machine = machine or Machine()
        self._books = Quarantine(errors)
        loaded = _open_input(
            source,
            split=split,
            roles=roles,
            transforms=transforms,
            petastorm=petastorm,
            sample=sample,
            opener=files or FileOpener(),
            allow_code=allow_code,
        )
        self._code = dict(loaded.code)
        self.operators = loaded.operators()
        """The operators that the table leaves to the loader, with their cost."""
        self.layout = loaded.layout
        stored = sum(file.rows for file in loaded.files)
        self.stored_bytes = sum(file.bytes for file in loaded.files) / max(1, stored)
        """The average size of a row in the table's files, in bytes."""
        self._columns = loaded.columns(fill, self.operators)
        self._groups = groups = loaded.row_groups(
            self._columns,
            self.operators,
            split=split,
            sample=sample,
            packed=packed,
            before_read=before_read,
        )
        rows = source_of(reader, groups, loaded.petastorm)
        self.reader = rows.name
        """The reader that decodes: `petastorm` or `arrow`."""
        self.plan = RowsPlan(
            groups=rows.row_groups,
            chances=groups.chances() if sample is not None else (),
            batch_size=batch_size,
            seed=seed,
            streams=default_streams(batch_size) if streams is None else streams,
            window_rows=WINDOW_ROWS if window_rows is None else window_rows,
            shuffle=shuffle,
            last=last,
        )
        share = self.plan.share_of(rank, ranks)
        self._table = {"version": loaded.source.version, "split": split}
        if rows.chosen_rows:
            self._table["rows of the predicate"] = rows.chosen_rows
        self._plain = loaded.plain if loaded.petastorm.transform_spec is None else None
        self._epochs = epochs
        self._remote = None
        if workers:
            self._remote = _remote_reads(
                workers,
                loaded.source,
                plan=self.plan,
                split=split,
                columns=self._columns,
                reader=rows.name,
                sample=sample,
                groups=groups,
                local_only={
                    "a packed copy": packed,
                    "before_read (--store-latency-ms)": before_read,
                    "what Petastorm's Reader is asked for": loaded.petastorm.asked_for,
                },
                rank=f"{rank}/{ranks}",
                functions=[t.function for t in loaded.transforms if t.sendable],
            )
            weakref.finalize(self, self._remote.close)  # also if what follows fails
        self._origins = Origins(self.plan, share)
        parts = self._pipeline_parts(rows, share, loaded.transforms, memory_limit)
        self._pipeline = Pipeline(parts, knobs)
        self._position = Position()
        self._order = ""
        self._run: Iterator[Ready] | None = None
        self._run_end = 0  # the first epoch that the pipeline does not reach
        self._iteration = 0
        self._under_way = self._closed = False
        self._progress = Progress(
            self._pipeline,
            machine,
            memory_limit,
            dict if self._remote is None else self._remote.stats,
        )
        self.order_hash: str | None = None
        """The order hash of the last finished epoch: a hash of the ids of this rank's rows and of their order. It does
        not depend on the knobs. Each rank has its own."""
        _open.add(self._pipeline)
        weakref.finalize(self, self._pipeline.close).atexit = False
        weakref.finalize(self, groups.close).atexit = False  # the collector may come much later

    def _pipeline_parts(
        self,
        rows: RowGroupSource,
        share: RankShare,
        transforms: Sequence[Transform],
        memory_limit: int | None,
    ) -> PipelineParts:
        groups = self._groups
        quarantine = RowQuarantine(self._books, self._origins, lambda file: groups.files[file].path)
        groups.rescue = quarantine if quarantine.allowed else None
        return PipelineParts(
            plan=self.plan,
            source=rows,
            describe=groups.describe,
            columns=self._columns,
            share=share,
            transforms=fused(transforms),
            aside=quarantine,
            memory_limit=self._machine.memory_limit(memory_limit),
            machine=self._machine,
            decoding=groups.decoding,
            converted=converted(groups.schema, self._columns),
            epochs=self._epochs,
            remote=self._remote,
        )

    # ---- the content of a batch

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The columns of numbers, in the order of `batch.dense`."""
        return self._columns.dense

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """The columns of ids, in the order of `batch.values`."""
        return self._columns.sparse

    @cached_property
    def cardinalities(self) -> Mapping[str, int]:
        """The number of rows that an embedding of each column of ids needs. For ids of plain files it is one more than
        the largest id, if the footers have it."""
        own = self._columns.cardinalities
        asked = [name for name in self.sparse_names if name not in own]
        found = {**(self._plain.sizes(asked) if self._plain and asked else {}), **own}
        return MappingProxyType({name: found[name] for name in self.sparse_names if name in found})

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes, on average, once decoded."""
        return self._columns.row_bytes

    def __len__(self) -> int:
        """The number of steps of an epoch, the same on every rank."""
        return self.plan.steps

    # ---- iteration

    def __iter__(self) -> Iterator[Batch]:
        self._check_open()
        if get_worker_info() is not None:
            raise LoaderError(
                "a loader has its own workers, and cannot run in those of a DataLoader. Use "
                "DataLoader(loader, batch_size=None, num_workers=0), or iterate over the loader itself"
            )
        self._iteration += 1
        return self._epoch(self._iteration)

    def _epoch(self, iteration: int) -> Iterator[Batch]:
        """Yields one epoch, or what is left of it after `load_state_dict`."""
        self._progress.enter("wait")
        try:
            run = self._begin(iteration)
            epoch = self._position.epoch
            while self._position.epoch == epoch:
                ready = next(run)
                try:
                    for batch in ready.batches:
                        self._count(batch)
                        self._progress.enter("compute")
                        yield batch
                        self._check_current(iteration)
                        self._progress.enter("wait")
                finally:  # also where the consumer goes away with the epoch's last batch
                    charge = ready.charge
                    del ready, batch  # a batch that is given back must not be held
                    if not self._pipeline.forked:  # whose locks may be held for ever
                        charge.release()
        except (Closed, SourceError, WorkerClosed) as error:
            # Closing interrupts reads and processes. If that is the reason, the message says so.
            self._check_current(iteration)
            if isinstance(error, SourceError):
                raise
            raise LoaderError("this loader was closed while a batch was waited for") from None
        finally:
            if iteration == self._iteration:
                if not sys.is_finalizing():
                    self._progress.enter("away")
                if self._under_way:  # the epoch was broken off, so its other batches are not needed
                    self._run = None
                    self._pipeline.close()

    def _begin(self, iteration: int) -> Iterator[Ready]:
        """Returns the source of the epoch's batches. Another thread may close the loader at any moment: what was
        started after its `close` is stopped here."""
        self._check_current(iteration)
        if self._under_way:
            self._position = Position(self._position.epoch + 1, 0)
            self._order = ""
            self._run = None
        run = self._run
        if run is None or self._position.epoch >= self._run_end:
            self._run_end = max(self._epochs, self._position.epoch + 1)
            self._run = run = self._pipeline.start(self._position, self._run_end)
        self._under_way = True
        if self._closed:
            self._end()
        self._check_current(iteration)
        return run

    def _count(self, batch: Batch) -> None:
        """Counts a batch that the consumer has taken."""
        self._progress.count(batch.rows)
        self._order = chain(self._order, batch.step, batch.checksum)
        self._position = Position(batch.epoch, batch.step + 1)
        if self._position.step == self.plan.steps:
            self._position = Position(batch.epoch + 1, 0)
            self.order_hash, self._order = self._order, ""
            # Some frameworks take `len(loader)` batches and never ask for the end.
            self._under_way = False

    def resting(self) -> AbstractContextManager[None]:
        """Returns a context for work between two batches that is no training, such as a validation or a checkpoint. Its
        time counts neither as waiting nor as computing, and the agent judges no change by it."""
        return self._progress.resting()

    # ---- position

    def place_of(self, epoch: int, step: int, row: int) -> str:
        """Returns where a row of this rank's batch comes from: file, row group and, unless rows are drawn by weight,
        the row in it. Empty for a row that only fills the batch."""
        origin = self._origins.batch(epoch, step)[row]
        if origin is None:
            return ""
        where = self._groups.describe(Read(origin.file, origin.group, 0, ()))
        return where if self.plan.chances else f"{where}, row {origin.row}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, for JSON. It fits other knobs and other numbers of ranks.
        `transforms` maps each transform's name to `module:function`, or to None for code that cannot be imported."""
        return {
            **self.plan.state(self._position),
            "table": dict(self._table),
            "order": self._order,
            **({"transforms": dict(self._code)} if self._code else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` continue from this position. Raises if the state belongs to other rows or another
        order, or if one of its transforms is not given now. Sluice cannot check that a transform still does the same
        thing."""
        self._check_open()
        for name, code in state.get("transforms", {}).items():
            if name not in self._code:
                what = (
                    f"{code!r}"
                    if code
                    else "a function without an importable name, so give it again"
                )
                raise LoaderError(
                    f"this state was made with the transform {name!r} ({what}), which is not among "
                    f"transforms={list(self._code)}"
                )
        table = state.get("table")
        table = table if isinstance(table, Mapping) else {}
        if others := [
            f"{name}: {table.get(name)!r} in the state, {self._table.get(name)!r} here"
            for name in {**self._table, **table}
            if table.get(name) != self._table.get(name)
        ]:
            raise LoaderError(f"this state belongs to other rows ({'; '.join(others)})")
        position = self.plan.position(state)
        self._pipeline.stop()
        self._run, self._under_way = None, False
        self._iteration += 1
        self._position, self._order = position, str(state.get("order", "")) if position.step else ""

    # ---- what the agent sees

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""
        return self._pipeline.knobs

    @property
    def limits(self) -> Limits:
        return self._pipeline.limits

    def apply(self, knobs: Knobs) -> None:
        """Changes the knobs while running. Rows and their order stay the same."""
        self._pipeline.apply(knobs)

    def snapshot(self) -> Snapshot:
        """Returns the counters since the start."""
        return self._progress.counters()

    @property
    def tunable(self) -> Progress:
        """What an agent looks at and changes. It does not see what happens while the trainer rests."""
        return self._progress

    def memory_used(self) -> int:
        """The number of anonymous and shared bytes that the process tree uses now."""
        return self._machine.memory_used()

    @property
    def epochs_loaded(self) -> float:
        """How many epochs the consumer has taken. The present one counts by its share."""
        return self._position.epoch + self._position.step / self.plan.steps

    @property
    def store(self) -> dict[str, int]:
        """Counts what was read through stores (reads, bytes, retries) and from the packed copy; empty for plain local
        files."""
        return self._groups.stats()

    def pack(self) -> None:
        """Makes the missing packed copies, up to their limit."""
        groups = self._groups
        if groups.packed is not None:
            groups.packed.make(groups.decoded, groups.row_groups)

    @property
    def quarantined(self) -> dict[str, Any]:
        """The rows quarantined so far: how many, why, and the file that lists them."""
        return self._books.summary()

    @property
    def worker_pids(self) -> list[int]:
        """The ids of the processes that run transforms now."""
        return self._pipeline.worker_pids

    @property
    def remote(self) -> dict[str, Any]:
        """What remote workers did: how many there are now, the bytes that came from them, and the repeated requests.
        Empty without remote workers."""
        return {} if self._remote is None else self._remote.stats()

    @property
    def remote_pids(self) -> list[int]:
        """The ids of the processes on this host that read for this loader now."""
        return [] if self._remote is None else self._remote.pids

    def burden(self, times: int) -> None:
        """Makes transforms do their work several times, to test what a heavier transform costs."""
        self._pipeline.burden(times)

    @property
    def worker_restarts(self) -> int:
        """The number of processes that ran transforms, died and were replaced."""
        return self._pipeline.restarts

    def stacks(self) -> str:
        """Returns the stacks of the processes that run transforms."""
        return self._pipeline.stacks()

    def memory(self) -> dict[str, Any]:
        """Returns the account of memory: the limit, the least sufficient limit with its parts, the bytes that no work
        is charged for, and how often work was held back, by reason."""
        return {
            "limit": self._progress.memory_limit(),
            "minimum": self.minimum_memory,
            "parts": self._pipeline.parts,
            "overhead": self._pipeline.overhead,
            "held_back": dict(self._pipeline.held_back),
        }

    @property
    def minimum_memory(self) -> int:
        """The limit that this loader needs: that of the control group if one leaves the least, otherwise that of this
        process."""
        return self._pipeline.least_limit

    @property
    def memory_need(self) -> str:
        """The least limit and its parts, in words."""
        least, start = format_bytes(self.minimum_memory), format_bytes(self._pipeline.base)
        return f"{least} of memory ({start} in use at the start, {self._pipeline.footprint})"

    # ---- the end

    def close(self) -> None:
        """Stops the pipeline, from any state. A second call does nothing, nor does a call in a fork of the process."""
        if not self._closed:
            self._closed = True
            if not self._pipeline.forked:
                self._end()

    def _end(self) -> None:
        self._run = None
        self._groups.interrupt()
        if self._remote is not None:
            self._remote.close()
        self._pipeline.stop()
        self._groups.close()
        self._books.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _check_current(self, iteration: int) -> None:
        self._check_open()
        if iteration != self._iteration:
            raise LoaderError(
                "another iteration of this loader has begun; each loader runs one at a time"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderError("this loader is closed")
        if self._pipeline.forked:
            raise LoaderError(
                "this loader was made before the process was forked, and its threads are in the other process. "
                "Make a loader in each process"
            )


def _remote_reads(workers: str, *how: Any, **more: Any) -> Any:
    """Returns what reads through these workers. Their code is an optional folder, loaded only here."""
    try:
        make = import_module("sluice.ingest.remote.reads").remote_reads
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("sluice.ingest.remote"):
            raise
        raise LoaderError(
            f"workers={workers!r} needs ingest/remote, which was left out of this copy of Sluice; the "
            "repository has it"
        ) from None
    return make(workers, *how, **more)


@atexit.register
def _close_all() -> None:
    """Closes all loaders, so that a program with a running pipeline ends at once."""
    for pipeline in list(_open):
        pipeline.stop()
