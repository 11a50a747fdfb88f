"""Reads row groups through Petastorm's Reader and worker, in the order of the plan: `PetastormSource`.

Petastorm defines the schema (Unischema), the shards, which row groups a selector keeps, and the cache's interface. Its
own worker does all that, and asks Sluice only for a row group's stored columns. Sluice controls the order, the pool and
the memory. A loader's TransformSpec runs later, as a function over rows.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import types
import warnings
from collections.abc import Iterator, Mapping
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
    filters_of,
    unischema_of,
)
from sluice.ingest.row_order import Read
from sluice.ingest.stages.shuffle import Decoded, ReadTask

if TYPE_CHECKING:
    from sluice.ingest.read.reader import RowGroupReader, Work

_DATASET = types.SimpleNamespace(partitions=None, fs=types.SimpleNamespace(open=lambda _path: None))
"""The dataset that workers get. No file is read through it."""


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
        from petastorm.transform import transform_schema

        self._groups = groups
        self._options = options
        self._shards = shards
        self.gives_arrays = shards is not None
        self._spec = None if shards is None else copy.copy(options.transform_spec)
        if self._spec is not None and self._spec.func:
            self._spec.func = functools.partial(call_on_frame, self._spec.func)
        self._pieces = [
            (file, group)
            for file, counts in enumerate(groups.row_groups)
            for group in range(len(counts))
        ]
        self._stored = unischema_of(groups.stored)
        self.schema = (
            self._stored if self._spec is None else transform_schema(self._stored, self._spec)
        )
        """The Unischema that Petastorm infers from the first file, after the TransformSpec."""
        if options.schema is not None and (wrong := difference(options.schema, self._stored)):
            raise PetastormError(f"{groups.files[0].path}: {wrong} (the schema that you gave)")
        groups.in_pages &= not options.asked_for and not self.gives_arrays
        groups.fetches &= options.cache is None  # it may have the row group
        self.row_groups, self.chosen_rows = self._selected()

    def results(self, pool: Iterator[Any]) -> Iterator[Any]:
        """Returns Petastorm's Reader over the results of a pool, without the dataset that it would open."""
        from petastorm.reader import Reader

        reader = object.__new__(Reader)
        reader._workers_pool, reader.schema, reader.ngram = pool, self.schema, None
        reader.last_row_consumed = reader.stopped = False
        reader._results_queue_reader = types.SimpleNamespace(
            batched_output=True, read_next=lambda pool, _schema, _ngram: next(pool)
        )
        return reader  # type: ignore[no-any-return]

    def make_work(self) -> Work:
        """Returns the work function of one worker."""
        from petastorm.cache import NullCache

        groups, cache = self._groups, self._options.cache
        numbers = {piece: number for number, piece in enumerate(self._pieces)}
        published: list[Any] = []
        worker = _worker_class()(
            0,
            published.append,
            (
                self,
                groups.files[0].path,  # a part of the cache's key
                self._stored,
                None,
                [types.SimpleNamespace(path=groups.files[file].path) for file, _ in self._pieces],
                NullCache() if cache is None else cache,
                self._spec,
                self.schema,
                None,
                False,
                None,
            ),
        )
        worker._dataset = _DATASET

        def decode(read: Read) -> Any:
            worker.process(numbers[read.file, read.group], None, (0, 1))
            # A worker publishes no table without rows.
            table = published.pop() if published else groups.stored.empty_table()
            if self.gives_arrays:
                return table
            if table.num_rows != read.rows:
                raise ValueError(
                    f"{table.num_rows} rows where {read.rows} are due: a predicate chooses the same "
                    "rows each time, and a cache returns what it was given"
                )
            return table if self._options.predicate is None else table.select(groups.needed)

        def work(task: ReadTask, charge: Charge) -> Decoded:
            worker.task = task
            return Decoded(task, groups.read(task.read, decode), charge)

        return work

    def stored_rows(self, task: ReadTask) -> pa.Table:
        """Returns the stored columns of the rows that the predicate keeps."""
        read, predicate = task.read, self._options.predicate
        table = self._groups.decoded(read.file, read.group, fetched=task.fetched)
        return table if predicate is None else table.filter(pa.array(_mask(predicate, table)))

    def _selected(self) -> tuple[tuple[tuple[int, ...], ...], str]:
        """Returns how many rows of each row group the selector and the predicate keep, and a hash of the kept rows."""
        from petastorm.reader import Reader

        every = self._groups.row_groups
        predicate, selector = self._options.predicate, self._options.rowgroup_selector
        count, shard, seed = (
            (self._shards or {}).get(name) for name in ("shard_count", "cur_shard", "seed")
        )
        numbers = list(range(len(self._pieces)))
        if selector is not None:
            # PetastormOptions refuses selectors that need an index.
            selected = selector.select_row_groups({})
            numbers = [number for number in numbers if number in selected]
        if count is not None or shard is not None:
            numbers = Reader._partition_row_groups(
                None, None, self._pieces, count, shard, numbers, seed
            )
        elif predicate is None and selector is None:
            return every, ""
        if not numbers:
            warnings.warn(
                "the row-group selector and the shard leave nothing to load", stacklevel=2
            )
        chosen = [self._pieces[number] for number in numbers]
        fields = filters_of(self._options)

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


@functools.cache
def _worker_class() -> Any:
    from petastorm.arrow_reader_worker import ArrowReaderWorker

    class PlanWorker(ArrowReaderWorker):  # type: ignore[misc]
        """Petastorm's worker. A `PetastormSource` reads the stored columns of its `task` for it."""

        def _read_with_shuffle_row_drop(self, *_: Any) -> pa.Table:
            return self._filesystem.stored_rows(self.task)

        def _load_rows(self, *about: Any) -> Any:
            table = super()._load_rows(*about)
            if not self._filesystem.gives_arrays:
                return table
            pool, results = (
                types.SimpleNamespace(get_results=lambda: table),
                self.new_results_queue_reader(),
            )
            return results.read_next(pool, self._transformed_schema, None)._asdict()

    return PlanWorker
