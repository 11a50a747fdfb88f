"""Users' functions over rows as they are stored: `SeriesFunctionWorker`, `RowFunctionWorker`.

Late ones get the rows of batches whose other columns are placed, so the first batch waits for one call. Early ones get
row groups before their rows are placed (`split_functions`), so long texts are gone before rows wait for batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import Closed, LoadingError
from sluice.ingest.flow.decoded import LOST, Decoded, MadeRows, Placed
from sluice.ingest.flow.placer import Placer
from sluice.ingest.flow.series import Chunks
from sluice.ingest.memory.governor import Charge
from sluice.ingest.process.row_call import asking_for
from sluice.ingest.row_order import SLICE_ROWS, Read, RowsPlan
from sluice.ingest.stages.batch import BatchSeries, Finisher
from sluice.ingest.stages.taken_rows import TakenRows, take_rows
from sluice.ingest.stages.transform import Transform, frame_of, needed_before, schema_with
from sluice.ingest.stages.transform_worker import TransformWorker

if TYPE_CHECKING:
    from sluice.ingest.cache.made_rows import MadeCache
    from sluice.ingest.read.decoding import Decoding
    from sluice.ingest.read.reader import RowGroupReader


_HELD_PART = 1 / 4
"""The most of the memory for loading that may be held for late functions until batches are complete."""


def split_functions(
    functions: Sequence[Transform], held_bytes: int, budget_bytes: int, kept: int = 0
) -> tuple[Sequence[Transform], Sequence[Transform]]:
    """Returns the functions over rows that are called before rows are placed (early), and the others (late).

    Functions over frames are early, because they get whole row groups. They come first. So are the first `kept` ones,
    whose results a cache keeps by reads. The others are late, unless what would be held for them takes more than a
    quarter of the memory for loading: `held_bytes` of `budget_bytes`."""
    frames = max(kept, sum(bool(frame_of(function)) for function in functions))
    if held_bytes > budget_bytes * _HELD_PART:
        frames = len(functions)
    return functions[:frames], functions[frames:]


def memory_of(
    early: Sequence[Transform],
    late: Sequence[Transform],
    decoding: Decoding,
    plan: RowsPlan,
    series_rows: int,
) -> int:
    """Returns the bytes of one call of each function, and of the longest series of batches between two late ones.

    The rows of a call are there as they are sent, and as the function's own objects. Its result is there twice: as it
    is sent, and in the loader's memory. It is taken to be as large as the rows and eight bytes for each value that it
    gives."""
    total = 2 * max(0, len(late) - 1) * decoding.decoded(series_rows)
    for function in (*early, *late):
        rows = plan.largest_group if frame_of(function) else min(plan.rows, SLICE_ROWS)
        total += 4 * decoding.decoded(rows) + 2 * 8 * rows * len(function.gives)
    return total


@dataclass(eq=False)
class RowFunctionCaller:
    """Calls a function over rows, for one worker. The rows are those of `groups` after the functions before it."""

    worker: TransformWorker
    groups: RowGroupReader

    def __post_init__(self) -> None:
        self.function = function = self.worker.stage.transform
        functions = self.groups.functions
        later = functions[functions.index(function) + 1 :]
        is_early = function in self.groups.early
        needed = self.groups.result_columns if is_early else self.groups.late_columns
        self._keeps = needed_before(needed, later)
        self._asks = asking_for(pa.schema(list(function.gives.items())), frame_of(function))
        self.replaced = False
        """Whether rows of the last read were replaced, because the function failed on them."""

    def __call__(self, table: pa.Table, rows: Read | TakenRows) -> pa.Table:
        """Returns the columns that are needed after the function."""
        try:
            return self._columns(table, rows)
        except ColumnError as error:
            self.replaced = True

            def attempt(start: int, stop: int) -> pa.Table:
                return self._columns(table.slice(start, stop - start), rows.piece(start, stop))

            return self.groups.rescue.replace_rows(
                error,
                None if frame_of(self.function) else attempt,  # a frame is a whole row group
                rows,
                schema_with(table.schema, self.function.gives, self._keeps),
                f"transform {self.function.name!r}",
            )

    def where(self, rows: Read | TakenRows) -> str:
        """Returns where rows are in the files, for messages."""
        read, first = rows.origin(0)
        if rows is read:
            return f"{self.groups.describe(read)}, rows {first} to {first + rows.rows}"
        others = f" and {rows.rows - 1} other rows" if rows.rows > 1 else ""
        return f"{self.groups.describe(read)}, row {first}{others}"

    def _columns(self, table: pa.Table, rows_there: Read | TakenRows) -> pa.Table:
        """Returns the columns that are needed after the function, in memory of their own."""
        function = self.function
        where = f"{self.where(rows_there)}: transform {function.name!r}"
        [rows] = table.select(function.reads).combine_chunks().to_batches()
        try:
            made = self.worker.call_on_rows(rows.replace_schema_metadata(self._asks), where)
        except (Closed, LoadingError):
            raise
        except Exception as error:
            raise ColumnError(f"{where}: {type(error).__name__}: {error}") from error
        columns = {}
        for kept in self._keeps:
            column = (made if kept in function.gives else table).column(kept)
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            # A copy, because a view would keep the shared memory or the row group of all columns.
            columns[kept] = pa.concat_arrays([*chunks, chunks[0].slice(0, 0)])
        return pa.table(columns)


@dataclass(eq=False)
class RowFunctionWorker:
    """One worker of a function over rows that are not placed yet."""

    call: RowFunctionCaller
    place: Callable[[Decoded, Charge], Placed] | None
    """Places the rows after the last function."""
    cache: MadeCache | None = None

    def __call__(self, decoded: Decoded | Placed, charge: Charge) -> Decoded | Placed:
        if isinstance(decoded, Placed):  # with what the functions made in an earlier pass
            decoded.charge.release()
            decoded.charge = charge
            return decoded
        read, rows, made_by = decoded.task.read, decoded.rows, decoded.made_by
        began, seconds, failed = time.monotonic(), decoded.seconds, decoded.has_failed
        made = self._kept(decoded)
        if made is not None and self.cache:
            rows = self.call.groups.with_made(rows, read, made)
            made_by = self.cache.functions
        elif rows.schema.metadata != LOST and self.call.function not in made_by:
            rows = self._call(rows, read)
            failed |= self.call.replaced
            seconds += time.monotonic() - began
            if self.cache and not failed:
                self._keep(self.cache, decoded.rows, rows, read, seconds)
            if self.place:
                rows = self.call.groups.finish(rows, read)
        decoded.release()
        decoded = Decoded(decoded.task, rows, charge, made_by=made_by)
        decoded.seconds, decoded.has_failed = seconds, failed
        return self.place(decoded, charge) if self.place else decoded

    def _call(self, rows: pa.Table, read: Read) -> pa.Table:
        self.call.replaced = False
        most = read.rows if frame_of(self.call.function) else SLICE_ROWS
        pieces = [
            read.piece(start, min(start + most, read.rows)) for start in range(0, read.rows, most)
        ]
        return pa.concat_tables(
            self.call(rows.slice(p.first - read.first, p.rows), p) for p in pieces
        )

    def _kept(self, decoded: Decoded) -> pa.Table | None:
        """Returns what an earlier pass has kept of a read that was decoded before entries could be used."""
        cache, rows, read = self.cache, decoded.rows, decoded.task.read
        if cache is None or self.call.function is not cache.functions[0] or decoded.made_by:
            return None
        if rows.schema.metadata == LOST:
            return None
        return cache.get_checked(read, self._again(rows, read))

    def _again(self, rows: pa.Table, read: Read) -> Callable[[int, int], pa.Table]:
        """Returns a function that calls the function again on some rows of a read."""
        return lambda start, stop: self.call(
            rows.slice(start, stop - start), read.piece(start, stop)
        )

    def _keep(
        self, cache: MadeCache, before: pa.Table, rows: pa.Table, read: Read, seconds: float
    ) -> None:
        """Gives a cache what its function made of a read."""
        function = self.call.function
        if function not in cache.functions:
            return

        cache.check(function, rows, self._again(before, read))
        if function is cache.functions[-1]:
            cache.put(read, rows, seconds)

    def prepare(self) -> None:
        self.call.worker.prepare()

    def close(self) -> None:
        self.call.worker.close()


@dataclass(eq=False)
class SeriesFunctionWorker:
    """One worker of a function over the rows of batches."""

    call: RowFunctionCaller
    placer: Placer
    """Places the columns that the last function gives."""
    chunks: Chunks
    finisher: Finisher | None
    """Finishes a series after the last function."""

    def __call__(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        taken: list[TakenRows] = []
        owners: list[Any] = []
        for rows in series.taken or take_rows(series, SLICE_ROWS):
            table, groups = self.call(rows.table, rows), self.call.groups
            if self.finisher is None:
                taken.append(replace(rows, table=table))
            elif groups.late_columns:
                table = groups.finish_late(table, rows, self.call.where(rows))
                made = MadeRows(table, rows.origin)
                owners += self.placer.place_made(made, rows.at, series.placed, self.chunks)
        if series.charge:
            series.charge.release()
        series = replace(series, taken=tuple(taken), owners=tuple(owners), charge=charge)
        return self.finisher.finish(series, charge) if self.finisher else series

    def prepare(self) -> None:
        self.call.worker.prepare()

    def close(self) -> None:
        self.call.worker.close()
