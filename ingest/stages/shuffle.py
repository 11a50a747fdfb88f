"""Collects decoded row groups until windows are complete (`Windows`), and moves the rows of a window to their places in
batches (`Placer`).

`ingest/row_order.py` sets the size of a window. A row group holds rows of several windows. If the shuffle stage is
fused with the read stage, the `ReadWorker` that reads a window's last row group also places the window's rows.
Otherwise the shuffle stage's own workers do.

A batch is stored feature by feature. Each number is moved only once, from Arrow's memory, or from a stored page, to its
place in a batch. The length and the address of a bag of ids are moved in the same way. Its ids are copied into the
window's order before, and into the batch when it is made.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, Read, RowsPlan, Window
from sluice.ingest.stages.bags import (
    BagRows,
    StoredBags,
    as_lists,
    bag_rows,
    find_pieces,
    stored_bags,
    with_copied_ids,
)
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.number_types import ValueRefused, arrow_array, filled_numbers, is_finite
from sluice.ingest.stages.scatter_kernel import (
    CONVERTED,
    PAGE,
    PLACE_FIELDS,
    WORDS,
    ColumnPages,
    DamagedPage,
    NumberColumns,
    compose_order,
    scatter,
)

if TYPE_CHECKING:
    from sluice.ingest.stages.batch import Chunk, Chunks

_STORED_ORDER = np.empty(0, np.uint64)


@dataclass(frozen=True)
class ReadTask:
    """One read of an epoch."""

    schedule: EpochSchedule
    read: Read
    fetched: Any = None
    """The result of `RowGroupReader.fetch`."""
    charge: Charge | None = None
    """The memory of what was fetched."""


class Decoded:
    """The rows of one read, local or remote. Their memory is released when all parts have been placed."""

    def __init__(
        self,
        task: ReadTask,
        rows: Any,
        charge: Charge | Decoded,
        *,
        parts: int | None = None,
        final: bool = False,
    ):
        """`rows` are an Arrow table; stored pages (`ingest.read.pages.StoredRows`); or, for users of Petastorm's own
        reader, a dict of arrays. The `charge` is released with them. `parts` is the number of the read's parts in the
        table, if not all. `final`: values already have a batch's form, so none is missing."""
        self.task = task
        if task.charge is not None:
            task.charge.release()  # the reader has freed what was fetched
        self.rows = rows
        self.nbytes: int = 0  # of a dict
        if isinstance(rows, pa.Table):
            self.nbytes = rows.get_total_buffer_size()
        elif not isinstance(rows, dict):
            self.nbytes = rows.nbytes
        self._charge = charge
        self.final = final
        self._parts_left = len(task.read.parts) if parts is None else parts
        self._lock = threading.Lock()
        self._pages: ColumnPages | None = None

    def pieces(self) -> list[WindowPiece]:
        """Returns the window piece for each part of the read."""
        return [WindowPiece(self, part.start, part.stop) for part in self.task.read.parts]

    def pages(self, columns: NumberColumns) -> ColumnPages:
        """Returns the pages of its columns of numbers. They are valid until its last part is done."""
        pages = self._pages
        if pages is None:  # two threads may both compute them and get the same result
            pages = self._pages = ColumnPages(self.rows, columns)
        return pages

    def replace(self, error: DamagedPage) -> None:
        """Takes other rows for all of its parts that are not placed yet, because a page is damaged."""
        with self._lock:
            if not isinstance(self.rows, pa.Table):
                self.rows = self.rows.replacement(error)
                self._pages = None

    def share(self, holders: int) -> None:
        """Lets so many holders share the memory. Each calls `release`."""
        self._parts_left = holders

    def release(self) -> None:
        """Notes that one part has been placed. Releases the memory after the last part."""
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        self.rows = self._pages = None
        self._charge.release()


@dataclass(frozen=True)
class WindowPiece:
    """The rows `start` to `stop` of a row group: a part of a window."""

    decoded: Decoded
    start: int
    stop: int
    in_order: bool = False
    """Whether it is the whole window, already in the window's order."""


class WindowRows:
    """The rows of a window. Until they are placed, `pieces` says where they lie. Afterwards they are in `chunks`."""

    def __init__(self, schedule: EpochSchedule, window: Window, first: int):
        """`first` is the first row in the stream that is needed. A resumed run may have used earlier ones."""
        self.schedule, self.window, self.first = schedule, window, first
        self.missing = window.rows
        """How many rows have not been read."""
        self.pieces: list[tuple[int, WindowPiece]] = []
        """The pieces, each with its first row in the window."""
        self.ready = False
        """Whether readers are done with it, so that it may go on. It may be placed or not."""
        self.error: BaseException | None = None
        """Why the rows could not be placed. It is raised when the window is due."""
        self.chunks: Sequence[Chunk] | None = None
        self.nbytes = 0
        self._rows_left = self.rows
        self._charge: Charge | None = None
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """The number of rows that are needed."""
        return self.end - self.first

    @property
    def end(self) -> int:
        """The row in the stream after the last."""
        return self.window.first + self.window.rows

    def hold(self, chunks: Sequence[Chunk], nbytes: int, charge: Charge) -> None:
        """Notes where the rows are. Releases the row groups, and keeps the charge for the rows."""
        for _, piece in self.pieces:
            piece.decoded.release()
        self.pieces = []
        self.chunks, self.nbytes, self._charge = chunks, nbytes, charge

    def give_away(self, rows: int) -> None:
        """Notes that `rows` of its rows are now in finished batches, which account for their memory."""
        assert self._charge is not None
        with self._lock:
            self._rows_left -= rows
            self._charge.correct(round(self._rows_left * self.nbytes / max(1, self.rows)))
            if not self._rows_left:
                self.chunks = ()


class Windows:
    """The windows of a run that the consumer has not taken yet."""

    def __init__(
        self,
        plan: RowsPlan,
        place: Callable[[WindowRows, Charge], WindowRows],
        counters: StageCounters,
        charge_early: Callable[[WindowRows, int], Charge | None],
    ) -> None:
        """`place` moves the rows of a window to their places. `counters` are those of the shuffle stage. `charge_early`
        returns a charge for a window, so many rows ahead of the due one, that a reader should place."""
        self.place, self.counters, self.charge_early = place, counters, charge_early
        self._stream_rows = plan.stream_rows
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int], WindowRows] = {}
        """The windows of which rows are there, by epoch and number of the window."""
        self._due: tuple[EpochSchedule, int] | None = None
        """The window that the consumer needs next: its schedule and its number there."""

    def add(self, read: Decoded) -> list[WindowRows]:
        """Adds the pieces of a read. Returns the windows that have all their rows now."""
        schedule = read.task.schedule
        done = schedule.step * self._stream_rows
        complete = []
        with self._lock:
            for part, piece in zip(read.task.read.parts, read.pieces(), strict=True):
                key = schedule.epoch, part.window
                rows = self._windows.get(key)
                if rows is None:
                    window = schedule.windows[part.window]
                    rows = WindowRows(schedule, window, max(window.first, done))
                    self._windows[key] = rows
                rows.pieces.append((part.at, piece))
                rows.missing -= piece.stop - piece.start
                if not rows.missing:
                    rows.pieces.sort(key=lambda placed: placed[0])
                    complete.append(rows)
        return complete

    def ahead(self, window: WindowRows) -> int:
        """Returns how many rows of a stream lie between the start of the next due window and the end of this one."""
        schedule, number = self._due or (window.schedule, 0)
        rows = window.end - _first(schedule, number)
        if schedule.epoch != window.schedule.epoch:
            rows += _first(schedule, len(schedule.windows))
        return rows

    def in_order(self, reads: Iterator[Decoded]) -> Iterator[WindowRows]:
        """Yields windows in the order in which the consumer needs them, as soon as reads complete them."""
        for schedule, group in itertools.groupby(reads, lambda read: read.task.schedule):
            due = 0
            self._due = schedule, due
            for _ in group:
                while (
                    window := self._windows.get((schedule.epoch, due))
                ) is not None and window.ready:
                    del self._windows[schedule.epoch, due]
                    due += 1
                    self._due = schedule, due
                    if window.error is not None:
                        raise window.error
                    yield window
                    del window


def _first(schedule: EpochSchedule, number: int) -> int:
    """Returns the first row of a window in its stream. For the number after the last window: the end of the last."""
    if number < len(schedule.windows):
        return schedule.windows[number].first
    return schedule.windows[-1].first + schedule.windows[-1].rows


@dataclass(eq=False)
class ReadWorker:
    """One worker that reads rows, or calls the last function over rows, and places the windows that are complete."""

    read: Callable[[Any, Charge], Decoded]
    windows: Windows
    clock: WorkerClock

    def __call__(self, item: Any, charge: Charge) -> Decoded:
        read = self.read(item, charge)
        # Corrected before `add`: after it, other workers may use the rows and release the charge.
        charge.correct(read.nbytes)
        for window in self.windows.add(read):
            window_charge = self.windows.charge_early(window, self.windows.ahead(window))
            if window_charge is not None:
                self.clock.go_over(self.windows.counters)
                try:
                    self.windows.place(window, window_charge)
                    window_charge.correct(window.nbytes)
                except BaseException as error:  # raised when the window is due
                    window_charge.release()
                    window.error = error
                else:
                    self.clock.passed(self.windows.counters, window.rows, window.nbytes)
            window.ready = True
        return read

    def close(self) -> None:
        if close := getattr(self.read, "close", None):  # a function over rows may hold a process
            close()


class Placer:
    """Moves rows from decoded columns to their places in batches. Many threads can use it."""

    def __init__(
        self, plan: RowsPlan, columns: Columns, describe: Callable[[Read], str], buffers: Buffers
    ):
        self._plan, self._columns, self._describe, self._buffers = plan, columns, describe, buffers
        self._layout: NumberColumns | None = None
        numbers = (*columns.floats, *columns.scalars)
        self._stored = [(n, columns.value_kind(n)) for n in numbers if n not in columns.added]
        self._fillable = np.array([name in columns.fill for name, _ in self._stored], bool)
        """For each stored column of numbers: whether nulls are filled. In floats, NaN and infinity are filled too."""

    def place(self, chunks: Chunks, window: WindowRows, charge: Charge) -> WindowRows:
        """Moves the rows of a window to their places in chunks. `charge` is for them from then on."""
        pieces = [piece for _, piece in window.pieces]
        epoch = window.schedule.epoch
        order = _STORED_ORDER if pieces[0].in_order else self._order(epoch, window.window)
        chunk_rows = self._plan.stream_rows * chunks.steps
        last = -(-window.end // chunk_rows) if window.rows else 0
        taken = [chunks.take(epoch, n) for n in range(window.first // chunk_rows, last)]
        nbytes = window.rows * chunks.row_bytes
        if taken:
            addresses, strides = np.stack([chunk.addresses for chunk in taken]), chunks.strides
            places, first = self._batch_places(window, chunks.steps), len(self._stored)
            self._move_numbers(pieces, order, places, addresses[:, :first], strides[:first])
            bags = self._bags(pieces, order)
            if len(order):
                for number, name in enumerate(self._columns.stored_bags):
                    if name not in self._columns.histories:
                        bags[number] = with_copied_ids(bags[number], self._buffers)
            self._move_bags(bags, places, addresses[:, first:], strides[first:])
            for chunk in taken:
                chunk.owners += [bag.owners for bag in bags]
            nbytes += sum(bag.nbytes for bag in bags)
        window.hold(taken, nbytes, charge)
        return window

    def gather_piece(self, piece: WindowPiece, epoch: int, window: Window | None) -> pa.RecordBatch:
        """Returns the rows of a piece in a batch's types, in new memory. If the piece is a whole `window`, its rows are
        in the window's order, otherwise in the row group's order."""
        order = _STORED_ORDER if window is None else self._order(epoch, window)
        rows = piece.stop - piece.start
        block = np.empty((len(self._stored), rows), np.int32)
        if rows:
            ends = np.uint64(block.ctypes.data) + np.arange(
                len(block), dtype=np.uint64
            ) * np.uint64(4 * rows)
            places = np.array([[0, 0, 1, 0, rows, 0]], np.int64)
            strides = np.zeros(len(block), np.int64)
            self._move_numbers([piece], order, places, ends[None], strides)
        arrays = {
            name: arrow_array(row.view(kind))
            for (name, kind), row in zip(self._stored, block, strict=True)
        }
        bags = self._bags([piece], order)
        for name, bag in zip(self._columns.stored_bags, bags, strict=True):
            arrays[name] = as_lists(bag, self._columns.value_kind(name))
        return pa.record_batch(arrays)

    # ---- places

    def _order(self, epoch: int, window: Window) -> Any:
        """Returns the order of a window's rows. Empty: they come as they are stored."""
        halves = self._plan.halves(epoch, window)
        return compose_order(*halves, window.rows) if halves else _STORED_ORDER

    def _batch_places(self, window: WindowRows, most: int) -> npt.NDArray[np.int64]:
        """Returns the places of a window's rows in chunks of `most` batches, in the form that `scatter` takes."""
        stream_rows = self._plan.stream_rows
        lane = window.schedule.streams.index(window.window.stream) * stream_rows
        row, last = window.first, window.end
        lowest = row // stream_rows // most
        places = []
        while row < last:
            step, inside = divmod(row, stream_rows)
            number, local = divmod(step, most)
            steps = 1 if inside else max(1, min((last - row) // stream_rows, most - local))
            width = min(stream_rows - inside, last - row)
            at = row - window.window.first
            places.append((number - lowest, local, steps, lane + inside, width, at))
            row += steps * width
        return np.array(places, np.int64).reshape(-1, PLACE_FIELDS)

    # ---- numbers

    def _move_numbers(self, pieces: Sequence[WindowPiece], *how: npt.NDArray[Any]) -> None:
        """Moves all columns of numbers to their places. `how` are order, places, targets and strides (`scatter`)."""
        while True:
            try:
                self._scatter(pieces, *how)
                return
            except DamagedPage as error:
                if error.decoded is None:
                    raise
                error.decoded.replace(error)

    def _scatter(self, pieces: Sequence[WindowPiece], *how: npt.NDArray[Any]) -> None:
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
        self, pieces: Sequence[WindowPiece], kinds: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Returns for each column whether its values must be converted before the move."""
        converted: npt.NDArray[np.bool_] = (kinds == CONVERTED).any(axis=0)
        if not all(piece.decoded.final for piece in pieces):
            for number in np.flatnonzero(self._fillable & ~converted):
                name = self._stored[number][0]
                converted[number] = not all(is_finite(_piece_column(p, name)) for p in pieces)
        return converted

    def _layout_of(self, decoded: Decoded) -> NumberColumns:
        rows, layout = decoded.rows, self._layout
        stored = () if isinstance(rows, pa.Table) else rows.stored
        if layout is None or layout.stored != stored or not layout.schema.equals(rows.schema):
            layout = self._layout = NumberColumns(rows.schema, self._columns, stored)
        return layout

    def _convert_column(self, number: int, pieces: Sequence[WindowPiece]) -> list[npt.NDArray[Any]]:
        """Converts a column whose stored values `scatter` cannot copy. Returns one array for each piece."""
        name, dtype = self._stored[number]
        arrays = []
        for piece in pieces:
            part = _piece_column(piece, name)
            try:
                arrays.append(filled_numbers(name, part, dtype, self._columns.fill.get(name)))
            except ValueRefused as refused:
                raise self._named(refused, piece, name) from None
        return arrays

    def _named(self, refused: ValueRefused, piece: WindowPiece, name: str) -> ColumnError:
        """Returns the error for a value of a piece."""
        where = self._describe(piece.decoded.task.read)
        return ColumnError(refused.message(where, name, range(piece.start, piece.stop)))

    # ---- bags

    @staticmethod
    def _move_bags(bags: Sequence[BagRows], *how: npt.NDArray[Any]) -> None:
        """Moves the length and the address of each bag to its place. `how` are places, targets and strides."""
        arrays = [array for bag in bags for array in bag[:3]]
        if arrays:
            pages = np.zeros((1, len(arrays), 1), PAGE)
            pages["address"][0, :, 0] = [array.ctypes.data for array in arrays]
            pages["rows"] = rows = len(arrays[0])
            kinds = np.full((1, len(arrays)), WORDS)
            scatter(pages, np.array([0]), np.array([rows]), kinds, _STORED_ORDER, *how)

    def _bags(self, pieces: Sequence[WindowPiece], order: npt.NDArray[np.uint64]) -> list[BagRows]:
        """Returns the bags of each column, in the window's order."""
        names, kind = self._columns.stored_bags, self._columns.value_kind
        if not names:
            return []
        ends = np.cumsum([piece.stop - piece.start for piece in pieces])
        if not len(order):
            order = np.arange(ends[-1], dtype=np.uint64)
        numbers, rows = (self._buffers.take_line(len(order), np.uint32) for _ in range(2))
        find_pieces(order, ends, numbers, rows)
        bags = []
        for name in names:
            parts: list[StoredBags] = []
            for piece in pieces:
                group_rows = piece.decoded.rows.num_rows
                try:
                    parts.append(stored_bags(_piece_column(piece, name), kind(name), group_rows))
                except ValueRefused as refused:
                    raise self._named(refused, piece, name) from None
            bags.append(bag_rows(parts, numbers, rows, self._buffers))
        return bags


def _piece_column(piece: WindowPiece, name: str) -> pa.ChunkedArray:
    """Returns the piece's rows of a column."""
    rows = piece.decoded.rows
    if isinstance(rows, pa.Table):
        return rows.column(name).slice(piece.start, piece.stop - piece.start)
    try:
        return rows.column(name, piece.start, piece.stop)
    except DamagedPage as error:
        raise DamagedPage(str(error), piece.decoded) from None
