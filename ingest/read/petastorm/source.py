"""Reads row groups through Petastorm's Reader and worker, in the order of the plan: `PetastormSource`.

Petastorm defines the schema (Unischema), the shards, and what a TransformSpec and a predicate get. Its own worker asks
Sluice only for a row group's stored columns. Sluice controls the order, the pool and the memory. A loader's
TransformSpec runs later, as a function over rows.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.ingest.flow.decoded import Decoded, ReadTask
from sluice.ingest.memory.governor import Charge
from sluice.ingest.process.row_call import call_on_frame
from sluice.ingest.read.petastorm import compat
from sluice.ingest.read.petastorm.options import unischema_of
from sluice.ingest.row_order import Read

if TYPE_CHECKING:
    from sluice.ingest.read.reader import RowGroupReader

_PIECE = types.SimpleNamespace(path="")
_DATASET = types.SimpleNamespace(fs=types.SimpleNamespace(open=lambda _path: None))
"""What workers get in place of a row group and of its dataset. No file is read through them."""


class PetastormSource:
    """Decodes with Petastorm's Reader and the worker of its Arrow reader."""

    name = "petastorm"

    def __init__(
        self,
        groups: RowGroupReader,
        predicate: Any,
        *,
        gives_arrays: bool = False,
        spec: Any = None,
        shard: tuple[int | None, int | None, int | None] = (None, None, None),
    ):
        """If it `gives_arrays`, row groups come as Petastorm's dicts of arrays, and the TransformSpec `spec` runs here,
        whose function may change their number of rows. `shard` has the number of shards, which of them is read, and
        the seed by which row groups are dealt out."""
        compat.install()
        from petastorm.transform import transform_schema

        self._groups, self._predicate = groups, predicate
        self.gives_arrays = gives_arrays
        self._spec = copy.copy(spec)
        if spec is not None and spec.func:
            self._spec.func = functools.partial(call_on_frame, spec.func)
        self._stored = unischema_of(groups.stored)
        self.schema = self._stored if spec is None else transform_schema(self._stored, spec)
        """The Unischema that Petastorm infers from the first file, after the TransformSpec."""
        self.row_groups, self.chosen_rows = self._selected(*shard)
        self._threads = threading.local()
        """The Reader of each thread."""

    def work(self, task: ReadTask, charge: Charge) -> Decoded:
        """Decodes a row group."""
        mine, groups = self._threads, self._groups
        if not hasattr(mine, "reader"):
            mine.reader = self._make_reader()
        reader = mine.reader
        reader.worker.task = task

        def decode(read: Read) -> Any:
            rows = next(reader)
            if self.gives_arrays:
                return rows._asdict()
            if rows.num_rows != read.rows:
                raise ValueError(
                    f"{rows.num_rows} rows where {read.rows} are due: a predicate chooses the same rows each time"
                )
            return rows if self._predicate is None else rows.select(groups.needed)

        rows = groups.read(task.read, decode)
        reader.worker.task = None
        return Decoded(task, rows, charge)

    def _make_reader(self) -> Any:
        """Returns Petastorm's Reader with one worker, without the dataset that it would open. It reads the row group of
        its worker's `task` when it is asked for the next one."""
        from petastorm.cache import NullCache
        from petastorm.reader import Reader

        published: list[tuple[pa.Table]] = []
        about = (self, "", self._stored, None, [_PIECE], NullCache(), self._spec, self.schema)
        worker = _worker_class()(0, published.append, (*about, None, False, None))
        worker._dataset = _DATASET

        def get_results() -> pa.Table:
            worker.process(0, None, (0, 1))
            [table] = published.pop()
            return table

        reader = object.__new__(Reader)
        reader.worker, reader._workers_pool = worker, types.SimpleNamespace(get_results=get_results)
        reader.schema, reader.ngram = self.schema, None
        reader.last_row_consumed = reader.stopped = False
        reader._results_queue_reader = worker.new_results_queue_reader()
        if not self.gives_arrays:  # batches need no arrays of whole row groups
            reader._results_queue_reader.read_next = lambda pool, *_: pool.get_results()
        return reader

    def stored_rows(self, task: ReadTask) -> pa.Table:
        """Returns the stored columns of the rows that the predicate keeps."""
        read, predicate = task.read, self._predicate
        table = self._groups.decoded(read.file, read.group, fetched=task.fetched, read=read)
        if predicate is not None:
            table = table.filter(pa.array(_mask(predicate, table)))
        for name in table.column_names if self.gives_arrays and self._spec is None else ():
            column = table.column(name)
            if pa.types.is_list(column.type) and (
                column.null_count or len(pc.list_value_length(column).unique()) > 1
            ):
                raise ValueError(
                    f"column {name!r} has lists of different lengths, or rows without one, and Petastorm makes one "
                    "array of them. Leave it out of schema_fields, pad it by a TransformSpec, or take sluice.Loader"
                )
        return table

    def _selected(
        self, count: int | None, shard: int | None, seed: int | None
    ) -> tuple[tuple[tuple[int, ...], ...], str]:
        """Returns how many rows of each row group the shard and the predicate keep, and a hash of the rows that the
        predicate keeps."""
        from petastorm.reader import Reader

        every, predicate = self._groups.row_groups, self._predicate
        chosen = [(file, group) for file, rows in enumerate(every) for group in range(len(rows))]
        if count is not None or shard is not None:
            numbers = list(range(len(chosen)))
            kept = Reader._partition_row_groups(None, None, chosen, count, shard, numbers, seed)
            chosen = [chosen[number] for number in kept]
            if not chosen:
                warnings.warn("the shard leaves nothing to load", stacklevel=2)
        if predicate is None:
            counted = {at: every[at[0]][at[1]] for at in chosen}
            which = ""
        else:
            fields = sorted(predicate.get_fields())
            masks = {
                at: _mask(predicate, self._groups.decoded(*at, columns=fields)) for at in chosen
            }
            counted = {at: int(mask.sum()) for at, mask in masks.items()}
            each = (hashlib.sha256(np.packbits(mask).tobytes()).digest() for mask in masks.values())
            which = hashlib.sha256(b"".join(each)).hexdigest()[:16]
        kept_rows = tuple(
            tuple(counted.get((file, group), 0) for group in range(len(groups)))
            for file, groups in enumerate(every)
        )
        return kept_rows, which


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

        def _load_rows(self, *about: Any) -> tuple[Any]:
            return (super()._load_rows(*about),)  # a table without rows would not be published

    return PlanWorker
