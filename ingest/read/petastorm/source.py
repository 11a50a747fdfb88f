"""Reads row groups through Petastorm's Reader and worker, in the order of the plan: `PetastormSource`.

Petastorm defines the schema (Unischema), which rows a selector and a predicate keep, the worker protocol and the
cache's interface. Its own worker does all that, and asks Sluice only for a row group's stored columns. Sluice controls
the order, the pool and the memory. A loader's TransformSpec runs later, as a function over rows.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sluice.ingest.memory.governor import Charge
from sluice.ingest.process.row_call import call_on_frame
from sluice.ingest.read.petastorm import compat
from sluice.ingest.read.petastorm.options import (
    PetastormError,
    PetastormOptions,
    difference,
    unischema_of,
)
from sluice.ingest.row_order import Read
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.shuffle import Decoded, ReadTask

if TYPE_CHECKING:
    from sluice.ingest.read.reader import MakePool, RowGroupReader, Work


class PetastormSource:
    """Decodes with Petastorm's Reader and the worker of its Arrow reader."""

    name = "petastorm"

    def __init__(
        self,
        groups: RowGroupReader,
        options: PetastormOptions = PetastormOptions(),
        *,
        shards: Mapping[str, Any] | None = None,
    ):
        """With `shards`, which has the Reader's arguments about shards, row groups come as Petastorm's dicts of arrays,
        and the TransformSpec runs here, whose function may change their number of rows."""
        compat.install()
        self._groups = groups
        self._options = options
        spec = None if shards is None else copy.copy(options.transform_spec)
        if spec is not None and spec.func:
            spec.func = functools.partial(call_on_frame, spec.func)
        self._reader_options = {
            "transform_spec": spec,
            "predicate": options.predicate,
            "rowgroup_selector": options.rowgroup_selector,
            "cache": options.cache,
            "worker_class": _worker_class(as_arrays=shards is not None),
            **(shards or {}),
        }
        self.stored = unischema_of(groups.stored)
        """The Unischema that Petastorm infers from the first file."""
        if options.schema is not None and (wrong := difference(options.schema, self.stored)):
            raise PetastormError(f"{groups.files[0].path}: {wrong} (the schema that you gave)")
        groups.compare = self._compare
        groups.in_pages &= not options.asked_for and shards is None
        groups.fetches &= options.cache is None  # it may have the row group
        self.row_groups, self.chosen_rows = self._selected()

    def open(self, tasks: Iterator[ReadTask], make_pool: MakePool) -> Iterator[Any]:
        reader: Iterator[Any] = self._reader(tasks, _PoolOfReader(self._groups, make_pool))
        return reader

    def idle(self) -> Any:
        """Returns a Petastorm Reader that reads nothing. It shows which row groups it would read."""
        return self._reader(iter(()), _PoolOfReader(self._groups, None))

    def _reader(self, tasks: Iterator[ReadTask], pool: _PoolOfReader) -> Any:
        return _reader_class()(
            tasks,
            self._groups,
            [f.path for f in self._groups.files],
            reader_pool=pool,
            is_batched_reader=True,
            shuffle_row_groups=False,
            **self._reader_options,
        )

    def _compare(self, schema: pa.Schema) -> str | None:
        return difference(self.stored, unischema_of(schema))

    def _selected(self) -> tuple[tuple[tuple[int, ...], ...], str]:
        """Returns how many rows of each row group the selector and the predicate keep, and a hash of the kept rows."""
        every = self._groups.row_groups
        predicate = self._options.predicate
        if (
            predicate is None
            and self._options.rowgroup_selector is None
            and self._reader_options.get("shard_count") is None
        ):
            return every, ""
        fields = [] if predicate is None else sorted(predicate.get_fields())
        positions = pieces_at(every)
        chosen = [positions[index] for index in self.idle().ventilator.row_groups]

        def rows(at: tuple[int, int]) -> tuple[int, bytes]:
            if predicate is None:
                return every[at[0]][at[1]], b""
            mask = _mask(predicate, self._groups.decoded(*at, columns=fields))
            return int(mask.sum()), hashlib.sha256(np.packbits(mask).tobytes()).digest()

        counted = dict(zip(chosen, self._groups.map_groups(rows, chosen, fields), strict=True))
        which = (
            ""
            if predicate is None
            else hashlib.sha256(b"".join(one for _, one in counted.values())).hexdigest()
        )
        return tuple(
            tuple(counted.get((file, group), (0, b""))[0] for group in range(len(groups)))
            for file, groups in enumerate(every)
        ), which[:16]


def pieces_at(row_groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the file and the row group of each of Petastorm's pieces."""
    return [(file, group) for file, groups in enumerate(row_groups) for group in range(len(groups))]


def _mask(predicate: Any, table: pa.Table) -> Any:
    """Returns which rows of a table a predicate keeps. As in Petastorm, it sees only the columns that it names."""
    frame = table.select(sorted(predicate.get_fields())).to_pandas()
    mask = np.asarray(predicate.do_include(frame))
    if mask.shape != (table.num_rows,):
        raise ValueError(
            f"predicate: it returned {mask.shape} values for {table.num_rows} rows. It gets a DataFrame "
            "and must return one value for each row"
        )
    return mask.astype(bool)


def _worker_class(as_arrays: bool) -> Any:
    """Makes the worker class. With `as_arrays`, a row group becomes Petastorm's dict of arrays instead of a table."""
    from petastorm.arrow_reader_worker import ArrowReaderWorker

    class PlanWorker(ArrowReaderWorker):  # type: ignore[misc]
        """Petastorm's worker. Only reading stored columns and applying the predicate are replaced."""

        def __init__(
            self, worker_id: int, publish: Callable[[pa.Table], None], args: Sequence[Any]
        ):
            super().__init__(worker_id, publish, args)
            self._dataset = compat.GIVEN
            self._dataset_path_or_paths: Any = args[1][0]  # a part of the cache's key
            self._positions = pieces_at(self._filesystem.row_groups)
            self._at = (0, 0)
            self._predicate = self.fetched = None

        def process(self, piece_index: int, *args: Any, **options: Any) -> None:
            self._at = self._positions[piece_index]
            super().process(piece_index, *args, **options)

        def _load_rows_with_predicate(
            self, file: Any, piece: Any, predicate: Any, part: Any
        ) -> Any:
            self._predicate = predicate
            return self._load_rows(file, piece, part)

        def _read_with_shuffle_row_drop(
            self, _piece: Any, _file: Any, _columns: Any, _part: Any
        ) -> pa.Table:
            table = self._filesystem.decoded(*self._at, fetched=self.fetched)
            return (
                table
                if self._predicate is None
                else table.filter(pa.array(_mask(self._predicate, table)))
            )

        def _load_rows(self, file: Any, piece: Any, part: Any) -> pa.Table:
            table = super()._load_rows(file, piece, part)
            if as_arrays:
                pool = types.SimpleNamespace(get_results=lambda: table)
                return (
                    ArrowReaderWorker.new_results_queue_reader()
                    .read_next(pool, self._transformed_schema, None)
                    ._asdict()
                )
            wanted = self._filesystem.given
            return table if wanted is None else table.select(wanted.names).cast(wanted)

        @staticmethod
        def new_results_queue_reader() -> Any:
            return _Results()

    return PlanWorker


def _reader_class() -> Any:
    from petastorm.reader import Reader
    from petastorm.workers_pool.ventilator import Ventilator

    class PlanVentilator(Ventilator):  # type: ignore[misc]
        """Hands out the plan's tasks when a worker asks. It needs no thread and no queue."""

        def __init__(self, tasks: Iterator[ReadTask], row_groups: Sequence[int], predicate: Any):
            super().__init__(None)
            self._tasks = tasks
            self.row_groups = row_groups
            self._predicate = predicate

        def start(self) -> None:
            pass

        def __iter__(self) -> Iterator[ReadTask]:
            return self._tasks

        def item(self, number: int) -> dict[str, Any]:
            """Returns the arguments for Petastorm's worker for one row group."""
            return {
                "piece_index": number,
                "worker_predicate": self._predicate,
                "shuffle_row_drop_partition": (0, 1),
            }

        def processed_item(self) -> None:
            pass

        def completed(self) -> bool:
            return False  # the pool itself notices the end of the tasks

        def stop(self) -> None:
            pass

    class PlanReader(Reader):  # type: ignore[misc]
        def __init__(self, tasks: Iterator[ReadTask], *args: Any, **options: Any):
            self._tasks = tasks
            super().__init__(*args, **options)

        def _create_ventilator(
            self,
            row_groups: Any,
            _shuffle: Any,
            _parts: Any,
            _epochs: Any,
            predicate: Any,
            *_others: Any,
        ) -> PlanVentilator:
            return PlanVentilator(self._tasks, row_groups, predicate)

        def _apply_row_group_selector(
            self, _dataset: Any, selector: Any, row_groups: Sequence[int]
        ) -> list[int]:
            # PetastormOptions refuses selectors that need an index.
            chosen = selector.select_row_groups({})
            return [number for number in row_groups if number in chosen]

    return PlanReader


class _Results:
    """Passes a pool's results to Petastorm's Reader unchanged."""

    batched_output = True

    def read_next(self, pool: _PoolOfReader, _schema: Any, _ngram: Any) -> Any:
        return pool.get_results()


class _PoolOfReader:
    """Sluice's pool with the interface that Petastorm's Reader expects. Without `make_pool` nothing is read, and the
    Reader only shows what it would read."""

    workers_count = 1  # the Reader uses this for its own ventilator, which is replaced

    def __init__(self, groups: RowGroupReader, make_pool: MakePool | None):
        self._groups = groups
        self._make_pool = make_pool
        self._pool: Pool[ReadTask, Any] | None = None
        self._ids = iter(range(2**62))
        self._lock = threading.Lock()
        self._firsts = [0]
        for counts in groups.row_groups:
            self._firsts.append(self._firsts[-1] + len(counts))

    def start(self, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        if self._make_pool is None:
            return

        def make_work() -> Work:
            published: list[pa.Table] = []
            empty = (
                self._groups.stored if self._groups.given is None else self._groups.given
            ).empty_table()
            with self._lock:
                worker = worker_class(next(self._ids), published.append, worker_args)

            def decode(read: Read) -> pa.Table:
                worker.process(**ventilator.item(self._firsts[read.file] + read.group))
                # A worker publishes nothing if no rows are left.
                table = published.pop() if published else empty
                if not isinstance(table, dict) and table.num_rows != read.rows:
                    raise ValueError(
                        f"{table.num_rows} rows where {read.rows} are due: a predicate chooses the same "
                        "rows each time, and a cache returns what it was given"
                    )
                return table

            def work(task: ReadTask, charge: Charge) -> Decoded:
                worker.fetched = task.fetched
                return Decoded(task, self._groups.read(task.read, decode), charge)

            return work

        ventilator.start()
        self._pool = self._make_pool(iter(ventilator), make_work)

    def get_results(self) -> Any:
        assert self._pool is not None
        return next(self._pool)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def join(self) -> None:
        if self._pool is not None:
            self._pool.join(5.0)

    @property
    def diagnostics(self) -> dict[str, Any]:
        return {} if self._pool is None else self._pool.stats().__dict__
