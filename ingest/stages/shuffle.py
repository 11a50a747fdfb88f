"""Moves the rows of a window to their places in batches: `Gatherer` makes a `Block` of a `Gathering`.

`ingest/row_order.py` sets the size of a window. A batch is stored feature by feature. Each value is moved only once,
from Arrow's memory to its place in a batch. So only decoding and this move touch it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, Read, RowsPlan, Window, rank_rows
from sluice.ingest.stages.bags import (
    BagError,
    Bags,
    HistoryViews,
    history_views,
    shuffle_bags,
)
from sluice.ingest.stages.number_types import ValueRefused, arrow_array, filled_numbers
from sluice.ingest.stages.scatter_kernel import (
    CONVERTED,
    PAGE,
    PLACE_FIELDS,
    WORDS,
    ColumnPages,
    NumberColumns,
    compose_order,
    scatter,
)

CHUNK_ROWS = 65536
_STORED_ORDER = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """One read of an epoch."""

    schedule: EpochSchedule
    read: Read
    fetched: Any = None
    """The result of `RowGroupReader.fetch`."""
    charge: Charge | None = None
    """The memory of what was fetched."""


class Releasable(Protocol):
    """Memory that is charged until it is released."""

    def release(self) -> None: ...


class DamagedPage(ValueError):
    """A stored page is not what was written. `decoded` has the row group of the page."""

    def __init__(self, text: str, decoded: Decoded | None = None):
        super().__init__(text)
        self.decoded = decoded


class RowsInPages(Protocol):
    """A row group of which some columns are pages as a file stores them. They are unpacked when they are moved."""

    nbytes: int
    num_rows: int
    schema: pa.Schema
    stored: tuple[str, ...]
    """The names of the columns that are pages."""
    pages: npt.NDArray[np.void]
    """Their pages, one row a column."""
    others: pa.Table
    """All other columns."""

    def column(self, name: str, start: int, stop: int) -> pa.ChunkedArray:
        """Unpacks some rows of a column. Raises DamagedPage."""

    def replacement(self, error: DamagedPage) -> pa.Table:
        """Returns the rows to take instead of these, or raises an error that names the file."""


class ReadRows(Protocol):
    """The result of one read, local or remote."""

    @property
    def task(self) -> ReadTask: ...

    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Iterable[WindowPiece]:
        """Returns the window piece for each part of the read."""


class Decoded:
    """The row group of one read. Its memory is released when all its parts have been gathered."""

    __slots__ = ("_charge", "_lock", "_pages", "_parts_left", "final", "rows", "task")

    def __init__(
        self,
        task: ReadTask,
        rows: pa.Table | RowsInPages,
        charge: Releasable,
        *,
        parts: int | None = None,
        final: bool = False,
    ):
        """`parts` is the number of the read's parts in the table, if not all. `final`: values already have a batch's
        form, so none is missing."""
        self.task = task
        if task.charge is not None:
            task.charge.release()  # the reader has freed what was fetched
        self.rows: Any = rows
        """An Arrow table, rows in pages, or a dict of arrays for users of Petastorm's own reader."""
        self._charge = charge
        self.final = final
        self._parts_left = len(task.read.parts) if parts is None else parts
        self._lock = threading.Lock()
        self._pages: ColumnPages | None = None

    @property
    def nbytes(self) -> int:
        return int(
            self.rows.get_total_buffer_size()
            if isinstance(self.rows, pa.Table)
            else self.rows.nbytes
        )

    def pieces(self) -> Iterable[WindowPiece]:
        return [WindowPiece(self, part.start, part.stop) for part in self.task.read.parts]

    def pages(self, columns: NumberColumns) -> ColumnPages:
        """Returns the pages of its columns of numbers. They are valid until its last part is done."""
        pages = self._pages
        if pages is None:  # two threads may both compute them and get the same result
            pages = self._pages = ColumnPages(self.rows, columns)
        return pages

    def replace(self, error: DamagedPage) -> None:
        """Takes other rows for all of its parts that are not gathered yet, because a page is damaged."""
        with self._lock:
            if not isinstance(self.rows, pa.Table):
                self.rows = self.rows.replacement(error)
                self._pages = None

    def share(self, holders: int) -> None:
        """Lets so many holders share the memory. Each calls `release`."""
        self._parts_left = holders

    def release(self) -> None:
        """Notes that one part has been gathered. Releases the memory after the last part."""
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        self.rows = self._pages = None
        self._charge.release()


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """The rows `start` to `stop` of a row group: a part of a window."""

    decoded: Decoded
    start: int
    stop: int
    in_order: bool = False
    """Whether it is the whole window, already in the window's order."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """A window whose rows have all been read, ready to be gathered."""

    schedule: EpochSchedule
    window: Window
    pieces: tuple[WindowPiece, ...]


class Chunk:
    """The memory of some consecutive batches: [batch, column, row] of floats and of ids."""

    __slots__ = ("__weakref__", "addresses", "floats", "ids")

    def __init__(self, floats: npt.NDArray[Any], ids: npt.NDArray[Any]):
        self.floats = floats
        self.ids = ids
        self.addresses = np.concatenate(
            [
                np.uint64(block.ctypes.data)
                + np.arange(block.shape[1], dtype=np.uint64) * np.uint64(block.strides[1])
                for block in (floats, ids)
            ]
        )
        """The address of each column in the chunk's first batch."""


class Chunks:
    """Hands out chunks by number. A chunk exists as long as a block has rows in it."""

    def __init__(self, plan: RowsPlan, columns: Columns, ranks: int, buffers: Buffers):
        self.steps = chunk_steps(plan, ranks)
        self._floats = (self.steps, len(columns.floats), rank_rows(plan.batch_size, ranks))
        self._ids = (self.steps, len(columns.scalars), rank_rows(plan.batch_size, ranks))
        self.strides = np.repeat(
            [4 * math.prod(shape[1:]) for shape in (self._floats, self._ids)],
            [len(columns.floats), len(columns.scalars)],
        )
        """For each column, the bytes from one batch in a chunk to the next."""
        self.buffers = buffers
        self._lock = threading.Lock()
        self._chunks: weakref.WeakValueDictionary[tuple[int, int], Chunk] = (
            weakref.WeakValueDictionary()
        )

    def take(self, epoch: int, number: int) -> Chunk:
        with self._lock:
            chunk = self._chunks.get((epoch, number))
            if chunk is None:
                chunk = Chunk(
                    self.buffers.take(self._floats, np.float32),
                    self.buffers.take(self._ids, np.int32),
                )
                self._chunks[epoch, number] = chunk
            return chunk


def chunk_steps(plan: RowsPlan, ranks: int) -> int:
    """Returns the number of batches in a chunk."""
    return max(1, CHUNK_ROWS * ranks // plan.batch_size)


class Block:
    """A gathered window. Its numbers are already in their batches. Its bags are not yet."""

    __slots__ = (
        "_charge",
        "_lock",
        "_row_bytes",
        "_rows_left",
        "bags",
        "chunks",
        "first",
        "nbytes",
        "rows",
        "schedule",
        "window",
    )

    def __init__(
        self,
        gathering: Gathering,
        first: int,
        *,
        chunks: Mapping[int, Chunk],
        bags: Mapping[str, Bags | HistoryViews],
        scalar_bytes: int,
        charge: Charge,
    ):
        """`first` is the block's first row in the stream. A resumed run may have used earlier rows of the window."""
        self.schedule = gathering.schedule
        self.window = gathering.window
        self.first = first
        self.rows = self._rows_left = self.window.first + self.window.rows - first
        self.chunks = chunks
        self.bags = bags
        self.nbytes = self.rows * scalar_bytes + sum(b.nbytes for b in bags.values())
        self._row_bytes = self.nbytes / max(1, self.rows)
        self._charge = charge
        self._lock = threading.Lock()

    def taken(self, rows: int) -> None:
        """Notes that `rows` of its rows are now in finished batches, which account for their memory."""
        with self._lock:
            self._rows_left -= rows
            self._charge.correct(round(self._rows_left * self._row_bytes))
            if not self._rows_left:
                self.bags = {}
                self.chunks = {}


class Gatherer:
    """One worker of the shuffle stage. It moves rows from decoded columns to their places in batches."""

    def __init__(
        self, plan: RowsPlan, columns: Columns, chunks: Chunks, describe: Callable[[Read], str]
    ):
        self._plan = plan
        self._columns = columns
        self._chunks = chunks
        self._describe = describe
        self._layout: NumberColumns | None = None
        every: list[tuple[str, type]] = [
            *((name, np.float32) for name in columns.floats),
            *((name, columns.id_kind(name)) for name in columns.scalars),
        ]
        self._stored = [one for one in every if one[0] not in columns.added]
        self._fillable = np.array([name in columns.fill for name, _ in self._stored], bool)
        """For each stored column of numbers: whether nulls are filled. In floats, NaN and infinity are filled too."""
        self._number_columns = np.array(
            [n for n, one in enumerate(every) if one[0] not in columns.added], np.int64
        )
        """The index of each stored column among all columns of numbers."""

    def __call__(self, gathering: Gathering, charge: Charge) -> Block:
        window = gathering.window
        columns = self._columns
        schedule = gathering.schedule
        order = None if gathering.pieces[0].in_order else self._order(schedule.epoch, window)
        first = max(window.first, schedule.step * self._plan.stream_rows)
        skipped = first - window.first
        chunks = self._take_chunks(schedule.epoch, first, window.first + window.rows)
        if chunks:
            self._move_numbers(
                gathering.pieces,
                order,
                self._batch_places(gathering, first),
                np.stack(
                    [chunk.addresses[self._number_columns] for _, chunk in sorted(chunks.items())]
                ),
                self._chunks.strides[self._number_columns],
            )
        if order is None and skipped:
            order = np.arange(window.rows, dtype=np.uint64)
        bags = self._bags(gathering.pieces, None if order is None else order[skipped:])
        for piece in gathering.pieces:
            piece.decoded.release()
        return Block(
            gathering,
            first,
            chunks=chunks,
            bags=bags,
            charge=charge,
            scalar_bytes=4 * (len(columns.floats) + len(columns.scalars)),
        )

    def gather_piece(self, piece: WindowPiece, epoch: int, window: Window | None) -> pa.RecordBatch:
        """Returns the rows of a piece in a batch's types, in new memory. If the piece is a whole `window`, its rows are
        in the window's order, otherwise in the row group's order."""
        order = None if window is None else self._order(epoch, window)
        rows = piece.stop - piece.start
        block = np.empty((len(self._stored), rows), np.int32)
        if rows:
            ends = np.uint64(block.ctypes.data) + np.arange(
                len(block), dtype=np.uint64
            ) * np.uint64(4 * rows)
            self._move_numbers(
                (piece,),
                order,
                np.array([[0, 0, 1, 0, rows, 0]], np.int64),
                ends[None],
                np.zeros(len(block), np.int64),
            )
        arrays = {
            name: arrow_array(row.view(kind))
            for (name, kind), row in zip(self._stored, block, strict=True)
        }
        bags = self._bags((piece,), order)
        return pa.record_batch(
            {
                **arrays,
                **{
                    name: one.as_arrow(rows, self._columns.value_kind(name))
                    for name, one in bags.items()
                },
            }
        )

    # ---- places

    def _order(self, epoch: int, window: Window) -> npt.NDArray[np.uint64] | None:
        halves = self._plan.halves(epoch, window)
        return None if halves is None else compose_order(*halves, window.rows)

    def _take_chunks(self, epoch: int, first: int, last: int) -> dict[int, Chunk]:
        stream_rows, steps = self._plan.stream_rows, self._chunks.steps
        numbers = (
            range(first // stream_rows // steps, (last - 1) // stream_rows // steps + 1)
            if last > first
            else ()
        )
        return {number: self._chunks.take(epoch, number) for number in numbers}

    def _batch_places(self, gathering: Gathering, first: int) -> npt.NDArray[np.int64]:
        """Returns the places of a window's rows, from row `first` of the stream on, in the form that `scatter`
        takes."""
        window = gathering.window
        stream_rows, most = self._plan.stream_rows, self._chunks.steps
        lane = gathering.schedule.streams.index(window.stream) * stream_rows
        row, last = first, window.first + window.rows
        lowest = first // stream_rows // most
        places = []
        while row < last:
            step, inside = divmod(row, stream_rows)
            number, local = divmod(step, most)
            steps = 1 if inside else max(1, min((last - row) // stream_rows, most - local))
            width = min(stream_rows - inside, last - row)
            places.append((number - lowest, local, steps, lane + inside, width, row - window.first))
            row += steps * width
        return np.array(places, np.int64).reshape(-1, PLACE_FIELDS)

    # ---- numbers

    def _move_numbers(
        self,
        pieces: tuple[WindowPiece, ...],
        order: npt.NDArray[np.uint64] | None,
        places: npt.NDArray[Any],
        targets: npt.NDArray[np.uint64],
        strides: npt.NDArray[Any],
    ) -> None:
        """Moves all columns of numbers to their places."""
        how = _STORED_ORDER if order is None else order, places, targets, strides
        while True:
            try:
                self._scatter(pieces, *how)
                return
            except DamagedPage as error:
                if error.decoded is None:
                    raise
                error.decoded.replace(error)

    def _scatter(self, pieces: tuple[WindowPiece, ...], *how: npt.NDArray[Any]) -> None:
        """Moves all columns of numbers. Raises DamagedPage before all of them are at their places."""
        sources = [piece.decoded.pages(self._layout_of(piece.decoded)) for piece in pieces]
        kinds = np.stack([source.kinds for source in sources])
        pages = np.zeros((*kinds.shape, max(source.pages.shape[1] for source in sources)), PAGE)
        for number, source in enumerate(sources):
            pages[number, :, : source.pages.shape[1]] = source.pages
        arrays = []
        for column in np.flatnonzero(self._must_convert(pieces, kinds)).tolist():
            arrays.append(self._convert_column(column, pieces))
            pages[:, column], kinds[:, column] = np.zeros(1, PAGE), WORDS
            for number, (array, piece) in enumerate(zip(arrays[-1], pieces, strict=True)):
                # As if the array also had the rows before those of the piece.
                address = array.ctypes.data - 4 * piece.start
                pages[number, column, 0]["address"] = address & (2**64 - 1)
                pages[number, column, 0]["rows"] = piece.stop
        starts = np.array([piece.start for piece in pieces])
        ends = np.cumsum([piece.stop - piece.start for piece in pieces])
        wrong = scatter(pages, starts, ends, kinds, *how)
        if wrong < 0:
            self._convert_column(-1 - wrong, pieces)  # raises an error that names the id
        if wrong:
            number, column = divmod(wrong - 1, kinds.shape[1])
            raise DamagedPage(self._stored[column][0], pieces[number].decoded)

    def _must_convert(
        self, pieces: tuple[WindowPiece, ...], kinds: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Returns for each column whether its values must be converted before the move."""
        converted: npt.NDArray[np.bool_] = (kinds == CONVERTED).any(axis=0)
        if not all(piece.decoded.final for piece in pieces):
            for number in np.flatnonzero(self._fillable & ~converted):
                name = self._stored[number][0]
                converted[number] = not all(_is_finite(_piece_column(p, name)) for p in pieces)
        return converted

    def _layout_of(self, decoded: Decoded) -> NumberColumns:
        rows = decoded.rows
        stored = () if isinstance(rows, pa.Table) else rows.stored
        layout = self._layout
        if layout is None or layout.stored != stored or not layout.schema.equals(rows.schema):
            layout = self._layout = NumberColumns(rows.schema, self._columns, stored)
        return layout

    def _convert_column(
        self, number: int, pieces: tuple[WindowPiece, ...]
    ) -> list[npt.NDArray[Any]]:
        """Converts a column whose stored values `scatter` cannot copy. Returns one array for each piece."""
        name, dtype = self._stored[number]
        arrays = []
        for piece in pieces:
            part = _piece_column(piece, name)
            try:
                arrays.append(filled_numbers(name, part, dtype, self._columns.fill.get(name)))
            except ValueRefused as refused:
                where = self._describe(piece.decoded.task.read)
                rows = range(piece.start, piece.stop)
                raise ColumnError(refused.message(where, name, rows)) from None
        return arrays

    # ---- bags

    def _bags(
        self, pieces: tuple[WindowPiece, ...], order: npt.NDArray[np.uint64] | None
    ) -> dict[str, Bags | HistoryViews]:
        columns = {
            name: [self._bags_of(name, piece) for piece in pieces]
            for name in self._columns.stored_bags
        }
        histories = {name: columns.pop(name) for name in self._columns.histories}
        rows = [piece.decoded.rows.num_rows for piece in pieces]
        try:
            return {
                **shuffle_bags(columns, order, self._chunks.buffers, self._columns.id_kind),
                **history_views(histories, rows, order),
            }
        except BagError as error:
            raise ColumnError(
                f"{self._describe(pieces[error.piece].decoded.task.read)}: column {error.column!r} has "
                f"{error}"
            ) from None

    @staticmethod
    def _bags_of(name: str, piece: WindowPiece) -> pa.Array:
        """Returns the bags of a piece as one array. Copies them only if Arrow has several chunks."""
        part = _piece_column(piece, name)
        if part.num_chunks == 1:
            return part.chunk(0)
        # There are several chunks if 32-bit offsets cannot count all bytes.
        if pa.types.is_binary(part.type):
            part = part.cast(pa.large_binary())
        return part.combine_chunks()


def _piece_column(piece: WindowPiece, name: str) -> pa.ChunkedArray:
    """Returns the piece's rows of a column."""
    rows = piece.decoded.rows
    if isinstance(rows, pa.Table):
        return rows.column(name).slice(piece.start, piece.stop - piece.start)
    try:
        return rows.column(name, piece.start, piece.stop)
    except DamagedPage as error:
        raise DamagedPage(str(error), piece.decoded) from None


def _is_finite(column: pa.ChunkedArray) -> bool:
    """Whether a column without nulls has no NaN and no infinity. `to_numpy` would import pandas."""
    return not pa.types.is_floating(column.type) or all(
        np.isfinite(np.from_dlpack(c)).all() for c in column.chunks
    )
