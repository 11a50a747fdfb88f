"""Loads the batches of one rank: `BatchLoader`. `sluice.Loader` is a `BatchLoader` with an agent that tunes it."""

from __future__ import annotations

import atexit
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pyarrow as pa
from torch.utils.data import IterableDataset, get_worker_info

from sluice.common.dropped import close_when_dropped
from sluice.common.errors import UsageError
from sluice.ingest.batch import Batch
from sluice.ingest.errors import Closed, LoaderError, SourceError
from sluice.ingest.knobs import Knobs, Limits, format_bytes, nearest
from sluice.ingest.loader_config import LoaderConfig
from sluice.ingest.loader_input import LoaderInput, open_input
from sluice.ingest.machine import Machine
from sluice.ingest.pipeline import Pipeline
from sluice.ingest.progress import Progress
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.row_order import Position, Read, RowsPlan, chain, differences_of
from sluice.ingest.stages.batch import BatchSeries
from sluice.ingest.stages.quarantine import Origins, Quarantine
from sluice.ingest.stats import LoaderStats, Snapshot

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.source_files import Paths
    from sluice.ingest.remote.client import RemoteClient

_KEPT_GROUPS = 32
"""The row groups whose columns `stored_rows` keeps: those of all streams, and the next ones."""
_open_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class BatchLoader(IterableDataset[Batch]):
    """Batches of a table for one rank, in an order that depends on (table version, seed, epoch) alone.

        with BatchLoader(FeatureTable.open("table"), batch_size=8192) as loader:
            for epoch in range(3):
                for batch in loader:
                    ...

    `sluice.Loader` is one that tunes itself. Its documentation also holds for the arguments of the same names here, but
    `memory_limit` is in bytes here.
    """

    def __init__(self, source: FeatureTable | ParquetFiles | Paths, **settings: Any):
        """`settings` are those of `LoaderConfig`."""
        self._config = config = LoaderConfig(source=source, **settings)
        self._input = open_input(config)
        share = self.plan.share_of(config.rank, config.ranks)
        self._remote = None
        if config.workers:
            self._remote = _remote_reads(config.workers, self._input)
        self._origins, groups = Origins(self.plan, share), self._input.groups
        self._quarantine = Quarantine(
            config.errors, self._origins, lambda file: groups.files[file].path
        )
        self.pipeline = Pipeline(
            self._input,
            share=share,
            machine=config.machine or Machine(),
            quarantine=self._quarantine,
            remote=self._remote,
        )
        remote_stats = self._remote.stats if self._remote else dict
        self._progress = Progress(self.pipeline, config.memory_limit, remote_stats)
        self._position = Position()
        self._stored = lru_cache(maxsize=_KEPT_GROUPS)(groups.decoded)
        self._hash_so_far = ""
        self._ready: Iterator[BatchSeries] | None = None
        self._iteration = self._end_epoch = 0  # the pipeline reads the epochs before `_end_epoch`
        self._in_epoch = self._closed = False
        self.observer: Any = None
        """An agent. `start()` tells it that an epoch starts, `end_epoch(next_epoch, order_hash)` that one has ended."""
        self.order_hash: str | None = None
        """The order hash of the last finished epoch: a hash of the ids of this rank's rows and of their order. It does
        not depend on the knobs. Each rank has its own."""
        _open_pipelines.add(self.pipeline)
        ends_waits = (self._remote.close,) if self._remote else ()
        close_when_dropped(self, *ends_waits, self.pipeline.close, self._input.groups.close)

    @property
    def table(self) -> FeatureTable | ParquetFiles:
        """The opened source."""
        return self._input.table

    @property
    def plan(self) -> RowsPlan:
        """The order of the rows of each epoch."""
        return self._input.plan

    @property
    def huge_group(self) -> int:
        """The rows of the largest row group, if it is huge and is read whole. Otherwise 0."""
        return 0 if self._input.groups.largest_read else self.plan.huge_group

    @property
    def reader(self) -> str:
        """The reader that decodes: `petastorm` or `arrow`."""
        return self._input.rows.name

    @property
    def layout(self) -> str:
        return self._input.layout

    @property
    def code(self) -> Mapping[str, str | None]:
        return self._input.code

    # ---- the content of a batch

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The columns of numbers, in the order of `batch.dense`."""
        return self._input.columns.dense

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """The columns of ids, in the order of `batch.values`."""
        return self._input.columns.sparse

    @cached_property
    def cardinalities(self) -> Mapping[str, int]:
        """The number of rows that an embedding of each column of ids needs. For plain files it is one more than the
        largest id, if the files' footers record that."""
        return MappingProxyType(self._input.cardinalities)

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes, on average, once decoded."""
        return self._input.columns.row_bytes

    def __len__(self) -> int:
        """The number of steps of an epoch, the same on every rank."""
        return self.plan.steps

    @property
    def described(self) -> str:
        """The rows, the steps of an epoch, the rank and the columns, in one line."""
        plan, table = self.plan, self.table
        parts = (
            f"{table.uri}, split {self._config.split}, {plan.rows:,} rows",
            f"{plan.steps:,} steps of {plan.batch_size:,}",
            f"rank {self._config.rank} of {self._config.ranks}",
            self._input.columns.described,
        )
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"BatchLoader({self.described})"

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled or copied, because threads and open files cannot go to another process."""
        raise LoaderError(
            "a loader cannot be pickled or copied, because it has threads and open files. Make one in each process; to "
            "continue at the same row, pass its state_dict() to load_state_dict() there. In a DataLoader, use "
            "DataLoader(loader, batch_size=None, num_workers=0)"
        )

    # ---- iteration

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise LoaderError(
                "a loader has its own workers, and cannot run in those of a DataLoader. Use "
                "DataLoader(loader, batch_size=None, num_workers=0), or iterate over the loader itself"
            )
        self._check_open()
        _refuse_batches_of_batches()
        self._iteration += 1
        return self._epoch(self._iteration)

    def _epoch(self, iteration: int) -> Iterator[Batch]:
        """Yields one epoch, or what is left of it after `load_state_dict`."""
        self._progress.enter("wait")
        try:
            run = self._start_epoch(iteration)
            epoch = self._position.epoch
            while self._position.epoch == epoch:
                series = next(run)
                try:
                    for batch in series.batches:
                        self._count(batch)
                        self._progress.enter("compute")
                        yield batch
                        self._check_current(iteration)
                        self._progress.enter("wait")
                finally:  # also runs if the consumer stops after the epoch's last batch
                    charge = series.charge
                    del series, batch  # a reference would keep the batch's memory from being reused
                    # In a fork, a lock may never be released.
                    if charge and not (self.pipeline.ended or self.pipeline.forked):
                        charge.release()
        except Exception as error:  # modules are emptied at exit, and only built-in names remain
            # Closing interrupts reads and processes. If that caused the error, the message says so.
            if isinstance(error, (Closed, SourceError)):
                self._check_current(iteration)
            if isinstance(error, UsageError):
                # The message says all. The frames of workers would hide it.
                raise error.with_traceback(None) from error.__cause__
            if not isinstance(error, Closed):
                raise
            raise LoaderError("this loader was closed while a batch was waited for") from None
        finally:
            if iteration == self._iteration and not self.pipeline.ended:
                self._progress.enter("away")
                # The consumer stopped early, so the other batches are not needed.
                if self._in_epoch:
                    self._ready = None
                    self.pipeline.close()

    def _start_epoch(self, iteration: int) -> Iterator[BatchSeries]:
        """Starts the epoch and returns its batches. Another thread may call `close` at any moment. If it did, this
        method stops what it has started."""
        self._check_current(iteration)
        if self._in_epoch:
            self._position = Position(self._position.epoch + 1, 0)
            self._hash_so_far = ""
            self._ready = None
        run = self._ready
        if run is None or self._position.epoch >= self._end_epoch:
            # The pipeline reads ahead only within the first `read_ahead_epochs` epochs. It reads each later one alone.
            self._end_epoch = max(self._config.read_ahead_epochs, self._position.epoch + 1)
            self._ready = run = self.pipeline.start(self._position, self._end_epoch)
        self._in_epoch = True
        if self._closed:
            self._stop()
        self._check_current(iteration)
        if self.observer is not None:
            self.observer.start()
        return run

    def _count(self, batch: Batch) -> None:
        """Counts a batch that the consumer has taken."""
        self._progress.count(batch.rows)
        self._hash_so_far = chain(self._hash_so_far, batch.step, batch.checksum)
        self._position = Position(batch.epoch, batch.step + 1)
        if self._position.step == self.plan.steps:
            self._position = Position(batch.epoch + 1, 0)
            self.order_hash, self._hash_so_far = self._hash_so_far, ""
            # The epoch ends here, because some frameworks take `len(loader)` batches and never ask for another.
            self._in_epoch = False
            if self.observer is not None:
                self.observer.end_epoch(self._position.epoch, self.order_hash)

    def resting(self) -> AbstractContextManager[None]:
        """Returns a context that pauses the measurements, for work that is not training, such as a validation or a
        checkpoint. Its time counts neither as waiting nor as computing, and the agent ignores it."""
        return self._progress.resting()

    # ---- position

    def place_of(self, epoch: int, step: int, row: int) -> str:
        """Returns where a row of this rank's batch comes from: file, row group and row. Empty for a row that only
        fills the batch."""
        origin = self._origins.batch(epoch, step)[row]
        if origin is None:
            return ""
        where = self._input.groups.describe(Read(origin.file, origin.group, 0, ()))
        return f"{where}, row {origin.row}"

    def stored_rows(
        self, epoch: int, step: int, rows: Sequence[int], names: tuple[str, ...]
    ) -> pa.Table:
        """Returns columns of some rows of this rank's batch, as the files store them. No row may be one that only fills
        the batch. It reads these columns again, so it is for evaluations."""
        batch = self._origins.batch(epoch, step)
        origins = [origin for row in rows if (origin := batch[row]) is not None]
        parts = []
        for place, some in groupby(origins, key=lambda origin: origin[:2]):
            table = self._stored(*place, names)
            for name in names:
                if name not in table.column_names:
                    known = [field.name for field in self.table.stored]
                    raise LoaderError(
                        f"{self.table.uri}: no file stores a column {name!r}{nearest(name, known)}"
                    )
            parts.append(table.select(names).take([origin.row for origin in some]))
        return pa.concat_tables(parts, promote_options="permissive")

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, for JSON. It fits other knobs and other numbers of ranks.
        `transforms` maps each transform's name to `module:function`, or to None for code that cannot be imported."""
        return {
            **self.plan.state(self._position),
            "table": self._input.identity,
            "order": self._hash_so_far,
            **({"transforms": dict(self.code)} if self.code else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` continue from this position. Raises if the state belongs to other rows or another
        order, or if one of its transforms is not given now. Sluice cannot check that a transform still does the same
        thing."""
        self._check_open()
        for name, code in state.get("transforms", {}).items():
            if name not in self.code:
                described = (
                    repr(code)
                    if code
                    else "a function without an importable name, so give it again"
                )
                raise LoaderError(
                    f"this state was made with the transform {name!r} ({described}), which is not among "
                    f"transforms={list(self.code)}"
                )
        own = self._input.identity
        table = state.get("table")
        table = table if isinstance(table, Mapping) else {}
        if others := differences_of(table, {**dict.fromkeys(table), **own}):
            before = re.match(r"v?(\d+)(-|$)", str(table.get("version")))
            advice = f"; to continue it, open the table with version={before[1]}" if before else ""
            raise LoaderError(f"this state belongs to other rows ({'; '.join(others)}){advice}")
        position = self.plan.position(state)
        self.pipeline.stop()
        self._ready = None
        self._in_epoch = False
        self._iteration += 1
        self._position = position
        self._hash_so_far = str(state.get("order", "")) if position.step else ""

    # ---- knobs and counters

    @property
    def knobs(self) -> Knobs:
        """The current knobs."""
        return self.pipeline.knobs

    @property
    def limits(self) -> Limits:
        return self.pipeline.limits

    def apply(self, knobs: Knobs) -> None:
        self.pipeline.apply(knobs)

    def snapshot(self) -> Snapshot:
        """Returns the counters since the start."""
        return self._progress.counters()

    def stats(self) -> LoaderStats:
        """Returns this rank's figures: rows a second, share of time waiting, and how long batches and stages took
        (`LoaderStats`). The first batch and the wait for it do not count. `to_dict()` gives the figures to a logger.
        `since(earlier)` limits them to the time since then."""
        return self._progress.stats(self._config.rank)

    @property
    def tunable(self) -> Progress:
        """The counters and knobs for an agent. It does not see what happens while the trainer rests."""
        return self._progress

    @property
    def epochs_loaded(self) -> float:
        """How many epochs the consumer has taken. The current epoch counts by the share that it has taken."""
        return self._position.epoch + self._position.step / self.plan.steps

    @property
    def store(self) -> dict[str, int]:
        """Counts what was read through stores (reads, bytes, retries); empty for plain local
        files."""
        return self._input.groups.stats()

    @property
    def quarantined(self) -> dict[str, Any]:
        """The rows quarantined so far: how many, why, and the file that lists them."""
        return self._quarantine.summary()

    @property
    def remote(self) -> dict[str, Any]:
        """The counters of remote workers: how many there are, the bytes that they sent and the repeated requests. Empty
        without remote workers."""
        return self._remote.stats() if self._remote else {}

    @property
    def remote_pids(self) -> list[int]:
        """The ids of the processes on this host that read for this loader now."""
        return [*self._remote.fleet.here] if self._remote else []

    def memory(self) -> dict[str, Any]:
        """Returns how memory is used, in bytes: the limit, the smallest sufficient limit with its parts, and memory
        that is charged to no work. Also how often work had to wait for memory, by reason."""
        return {
            "limit": self._progress.memory_limit(),
            "minimum": self.pipeline.least_limit,
            "parts": self.pipeline.parts,
            "overhead": self.pipeline.overhead,
            "held_back": dict(self.pipeline.held_back),
        }

    @property
    def memory_need(self) -> str:
        """The smallest sufficient memory limit and its parts, as a text."""
        pipeline = self.pipeline
        return (
            f"{format_bytes(pipeline.least_limit)} of memory ({format_bytes(pipeline.memory.base)} in use at the "
            f"start, {pipeline.footprint})"
        )

    # ---- the end

    def close(self) -> None:
        """Stops the pipeline, from any state. A second call does nothing. A call in a fork does nothing either."""
        if not self._closed:
            self._closed = True
            if not self.pipeline.forked:
                self._stop()

    def _stop(self) -> None:
        self._ready = None
        self._input.groups.interrupt()
        if self._remote:
            self._remote.close()
        self.pipeline.stop()
        self._input.groups.close()
        self._quarantine.close()

    @property
    def closed(self) -> bool:
        return self._closed

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
        if self.pipeline.forked:
            raise LoaderError(
                "this loader was made before the process was forked, and its threads are in the other process. "
                "Make a loader in each process"
            )


def _refuse_batches_of_batches() -> None:
    """Raises if torch's DataLoader iterates in order to collate several batches into one. Only its frame tells."""
    frame = sys._getframe(2)
    for _ in range(2):  # a BatchLoader is iterated by a DataLoader, or by a Loader that is
        if frame.f_globals.get("__name__") == "torch.utils.data._utils.fetch":
            if frame.f_locals.get("auto_collation"):
                raise LoaderError(
                    "a loader gives whole batches, and DataLoader would collate several of them into one. Use "
                    "DataLoader(loader, batch_size=None)"
                )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def _remote_reads(workers: str, given: LoaderInput) -> RemoteClient:
    """Connects to remote workers."""
    from sluice.ingest.remote.reads import remote_reads  # imports Arrow Flight

    try:
        return remote_reads(workers, given)
    except BaseException:
        given.groups.close()
        raise


@atexit.register
def _close_all() -> None:
    """Stops all pipelines, so that a program ends immediately."""
    for pipeline in list(_open_pipelines):
        pipeline.end()
