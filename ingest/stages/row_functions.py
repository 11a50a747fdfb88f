"""Users' functions over rows as they are stored: `cut_into_slices`, `RowFunctionWorker`.

They run between reading and shuffling, so texts are gone before rows wait for their batches. A row group is cut into
slices, so that several workers share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import LoadingError
from sluice.ingest.flow.decoded import Decoded, ReadTask
from sluice.ingest.memory.governor import Charge
from sluice.ingest.process.row_call import asking_for
from sluice.ingest.process.worker import WorkerClosed
from sluice.ingest.row_order import SLICE_ROWS, Read
from sluice.ingest.stages.pool import Closed
from sluice.ingest.stages.quarantine import LOST
from sluice.ingest.stages.transform import Transform, frame_of, needed_before, schema_with
from sluice.ingest.stages.transform_worker import TransformWorker

if TYPE_CHECKING:
    from sluice.ingest.read.decoding import Decoding
    from sluice.ingest.read.reader import RowGroupReader


def cut_into_slices(reads: Iterator[Decoded]) -> Iterator[Decoded]:
    """Yields slices of row groups. Those of one row group come in the order in which batches need them, so that the
    first batch does not wait for a whole row group. Its memory is released after its last slice."""
    for decoded in reads:
        read = decoded.task.read
        pieces = read.pieces(SLICE_ROWS)
        table = decoded.rows
        decoded.share(len(pieces))
        for piece in pieces:
            yield Decoded(
                ReadTask(decoded.task.schedule, piece),
                table.slice(piece.first - read.first, piece.rows),
                decoded,
            )
        del decoded, table


def memory_of(functions: Sequence[Transform], decoding: Decoding, largest: int) -> int:
    """Returns the bytes of one call of each function. `largest` is the rows of the largest row group.

    Its rows are there as they are sent, and as the function's own objects. Its result is there twice: as it is sent,
    and in the loader's memory. It is taken to be as large as the rows and eight bytes for each value that it gives."""
    total = 0
    for function in functions:
        rows = largest if frame_of(function) else min(largest, SLICE_ROWS)
        total += 4 * decoding.decoded(rows) + 2 * 8 * rows * len(function.gives)
    return total


@dataclass(eq=False)
class RowFunctionWorker:
    """One worker of a function over rows, which are the `groups` after the functions before it."""

    caller: TransformWorker
    groups: RowGroupReader

    def __post_init__(self) -> None:
        self._function = function = self.caller.stage.transform
        names = [other.name for other in self.groups.functions]
        later = self.groups.functions[names.index(function.name) + 1 :]
        self._is_last = not later
        self._keeps = needed_before(self.groups.result_columns, later)
        self._asks = asking_for(pa.schema(list(function.gives.items())), frame_of(function))

    def __call__(self, piece: Decoded, charge: Charge) -> Decoded:
        read, rows = piece.task.read, piece.rows
        is_lost = rows.schema.metadata == LOST
        try:
            rows = rows if is_lost else self._columns(rows, read)
        except ColumnError as error:

            def attempt(start: int, stop: int) -> pa.Table:
                return self._columns(piece.rows.slice(start, stop - start), read.piece(start, stop))

            rows = self.groups.rescue.replace_rows(
                error,
                None if frame_of(self._function) else attempt,  # a frame is a whole row group
                read,
                schema_with(piece.rows.schema, self._function.gives, self._keeps),
                f"transform {self._function.name!r}",
            )
        if self._is_last and not is_lost:
            rows = self.groups.finish(rows, read)
        piece.release()
        return Decoded(piece.task, rows, charge)

    def close(self) -> None:
        self.caller.close()

    def _columns(self, table: pa.Table, read: Read) -> pa.Table:
        """Returns the columns that are needed after the function, in memory of their own."""
        function, name = self._function, self._function.name
        where = f"{self.groups.describe(read)}, rows {read.first} to {read.first + read.rows}: transform {name!r}"
        [rows] = table.select(function.reads).combine_chunks().to_batches()
        try:
            made = self.caller.call_on_rows(rows.replace_schema_metadata(self._asks), where)
        except (WorkerClosed, Closed, LoadingError):
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
