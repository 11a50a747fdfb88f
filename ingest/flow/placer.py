"""Moves the rows of row groups to their places in batches: `Placer`.

A batch is stored feature by feature. Each number is moved only once, from a stored page or from Arrow's memory to its
place in a batch. The length and the address of a bag of ids are moved in the same way. Its ids are copied into the
order of the batches before, and into the batch when it is made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.flow.bags import as_lists, stored_bags
from sluice.ingest.flow.decoded import LOST, DamagedPage, Decoded, MadeRows, Placed, held_of
from sluice.ingest.flow.number_columns import NumberColumns
from sluice.ingest.flow.number_types import ValueRefused, arrow_array, filled_numbers
from sluice.ingest.flow.place_rows import (
    BAGS,
    CONVERTED,
    DIFFERS,
    LEFT,
    PART,
    PLACED,
    WORDS,
    Scratch,
    find_places,
)
from sluice.ingest.flow.series import Chunks, addresses_of
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import Read, RowsPlan, Window

_FEW_PARTS = 8
"""Rows that are less than this part of their window are ordered one by one. For others, the whole order is passed."""
_NO_BAGS = np.zeros(0, BAGS)


class PlacedPart(NamedTuple):
    """Rows of a read that belong to one window."""

    start: int
    """The first of them, among the rows that were read."""
    rows: int
    low: int
    """The first of them in the window."""
    first: int
    """The first row of the window in its stream."""
    window_rows: int
    lane: int
    """Where batches have the rows of the stream."""
    window: Window | None
    """The window whose order they take. None: they come as they were read."""
    places: npt.NDArray[np.uint32] | None = None
    """The place of each row in the window, instead of the window's order."""


class Places(NamedTuple):
    """Where rows go: batches from `first_step` on, with `each` rows of a stream."""

    parts: Sequence[PlacedPart]
    epoch: int
    each: int
    first_step: int
    targets: npt.NDArray[np.uint64]
    """For each batch, the addresses of its arrays."""
    numbers: npt.NDArray[np.int64]
    """For each stored column of numbers, its array and where it begins there, in bytes."""
    bags: npt.NDArray[np.int64]
    """For each stored column of bags, where lengths and both halves of addresses begin."""
    row_numbers: tuple[int, int] | None = None
    """Where the numbers of rows begin. None: rows get none."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The first row that is needed of those that were read, and the row after the last."""
        return (
            min((part.start for part in self.parts), default=0),
            max((part.start + part.rows for part in self.parts), default=0),
        )


class MovedRows(NamedTuple):
    """What was moved."""

    rows: npt.NDArray[np.int64]
    """How many rows each batch got."""
    owners: list[Any]
    """What owns the ids of bags."""
    nbytes: int
    """The bytes of these ids."""
    is_lost: bool
    """Whether there were zeros in place of the rows, which could not be read."""


class Placer:
    """Moves rows to their places. Many threads can use it."""

    def __init__(
        self, plan: RowsPlan, columns: Columns, describe: Callable[[Read], str], buffers: Buffers
    ):
        self._plan, self._columns, self._describe, self._buffers = plan, columns, describe, buffers
        self._layout: NumberColumns | None = None
        self._numbers = [(name, columns.value_kind(name)) for name in columns.stored_numbers]
        self._fillable = np.array([name in columns.fill for name, _ in self._numbers], bool)
        """For each stored column of numbers: whether nulls are filled. In floats, NaN and infinity are filled too."""
        self._threads = threading.local()
        # Rows of each stream are read for one window at a time, and for the next one.
        self._places_of = functools.lru_cache(maxsize=2 * plan.streams)(self._find_places)

    def place(self, decoded: Decoded, chunks: Chunks, charge: Charge) -> Placed:
        """Moves the rows of a read to their places in chunks. The `charge` is for them from then on."""
        schedule, each = decoded.task.schedule, self._plan.stream_rows
        parts = [part for part in self._parts_of(decoded) if part.rows]
        first = max(schedule.step, min((part.first for part in parts), default=0) // each)
        end = max((part.first + part.window_rows for part in parts), default=0)
        targets, taken = chunks.targets(schedule.epoch, first, max(first, -(-end // each)))
        where = chunks.places_of(self._columns.added)
        places = Places(parts, schedule.epoch, each, first, targets, *where, chunks.numbers)
        held = held_of(decoded.rows) if chunks.numbers else None
        moved = self._move(decoded, places)
        rows = int(moved.rows.sum())
        nbytes = rows * chunks.row_bytes + moved.nbytes * (rows > 0)
        about = decoded.task, first, moved.rows, taken, moved.owners, nbytes, charge
        return Placed(*about, None if moved.is_lost else held)

    def place_made(
        self,
        made: MadeRows,
        at: npt.NDArray[np.int64],
        arrays: Sequence[npt.NDArray[Any]],
        chunks: Chunks,
    ) -> list[Any]:
        """Moves columns that functions made to their places in the `arrays` of a series: each row to place `at`,
        counted from the first batch on. Returns what owns the ids of bags, until the batches are made."""
        each, where = arrays[0].shape[2], chunks.places_of(self._columns.added)
        first = int(at.min()) // each
        part = PlacedPart(
            start=0,
            rows=len(at),
            low=0,
            first=first * each,
            window_rows=int(at.max()) + 1 - first * each,
            lane=0,
            window=None,
            places=(at - first * each).astype(np.uint32),
        )
        return self._move(made, Places([part], 0, each, 0, addresses_of(arrays), *where)).owners

    def gather(
        self, decoded: Decoded, parts: Sequence[tuple[int, int, Window | None]], epoch: int
    ) -> pa.RecordBatch:
        """Returns some rows of a read in a batch's types, in new memory: part after part, each from its first row up to
        but without its last. If a part is a whole window, its rows come in the window's order, otherwise as they are
        stored."""
        bag_names, placed, rows = self._columns.stored_bags, [], 0
        for start, stop, window in parts:  # as if each was a window, and all were one batch
            placed.append(PlacedPart(start, stop - start, 0, rows, stop - start, 0, window))
            rows += stop - start
        numbers = np.empty((len(self._numbers), rows), np.int32)
        lengths = np.empty((len(bag_names), rows), np.int32)
        addresses = np.empty((len(bag_names), 2, rows), np.uint32)
        arrays = (numbers, numbers, lengths, addresses)
        at, bag = 4 * rows * np.arange(len(numbers)), 4 * rows * np.arange(len(lengths))
        places = Places(
            [part for part in placed if part.rows],
            epoch,
            max(1, rows),
            0,
            np.array([[array.ctypes.data for array in arrays]], np.uint64),
            np.stack([np.zeros_like(at), at], 1),
            np.stack([bag, 2 * bag, 2 * bag + 4 * rows], 1),
        )
        moved = self._move(decoded, places, copies_ids=False)
        columns = {
            name: arrow_array(row.view(kind))
            for (name, kind), row in zip(self._numbers, numbers, strict=True)
        }
        for n, name in enumerate(bag_names):
            low, high = addresses[n]
            columns[name] = as_lists(lengths[n], low, high, self._columns.value_kind(name))
        del moved  # until now it owned the ids
        return pa.record_batch(columns)

    # ---- places

    def _parts_of(self, decoded: Decoded) -> list[PlacedPart]:
        """Returns the parts of a read."""
        schedule, each, parts, begin = decoded.task.schedule, self._plan.stream_rows, [], 0
        for number, part in enumerate(decoded.task.read.parts):
            window, rows = schedule.windows[part.window], part.stop - part.start
            lane = schedule.streams.index(window.stream) * each
            start, order = part.start, window if self._plan.shuffle else None
            if decoded.in_order is not None:  # only the rows of parts are there
                start, begin = begin, begin + rows
                order = None if decoded.in_order[number] else order
            parts.append(PlacedPart(start, rows, part.at, window.first, window.rows, lane, order))
        return parts

    def _describe_parts(
        self, places: Places
    ) -> tuple[npt.NDArray[np.void], list[npt.NDArray[np.uint32]]]:
        """Returns the parts in the form that the compiled function takes, and what owns their orders."""
        described, owners = [], []
        for part in places.parts:
            outer = inner = length = at = 0
            if part.places is not None:
                owners.append(part.places)
                at = part.places.ctypes.data
            elif part.window is not None and part.rows * _FEW_PARTS < part.window_rows:
                owners.append(order := self._places_of(places.epoch, part.window))
                at = order.ctypes.data
            elif part.window is not None:
                halves = self._plan.halves(places.epoch, part.window)
                assert halves is not None
                owners += halves
                outer, inner, length = (
                    halves[0].ctypes.data,
                    halves[1].ctypes.data,
                    len(halves[0]),
                )
            bounds = part.low, part.low + part.rows
            where = part.start, part.first, part.lane
            described.append((part.window_rows, *bounds, *where, outer, inner, length, at))
        return np.array(described, PART), owners

    def _find_places(self, epoch: int, window: Window) -> npt.NDArray[np.uint32]:
        halves = self._plan.halves(epoch, window)
        assert halves is not None
        return find_places(*halves, window.rows)

    # ---- the move

    def _move(
        self, decoded: Decoded | MadeRows, places: Places, *, copies_ids: bool = True
    ) -> MovedRows:
        """Moves all columns to their places. Frees the rows of the read."""
        while True:
            try:
                moved = self._move_now(decoded, places, copies_ids)
            except DamagedPage as error:
                decoded.rows = decoded.rows.replacement(error)
            else:
                decoded.rows = None
                return moved

    def _move_now(self, decoded: Decoded | MadeRows, places: Places, copies_ids: bool) -> MovedRows:
        """Moves all columns to their places. Raises DamagedPage perhaps before all are there."""
        columns, owner = self._layout_of(decoded).describe(decoded.rows)
        columns["block"], columns["offset"] = places.numbers.T
        columns["must_be_finite"] = self._fillable & (decoded.in_order is None)
        held: list[Any] = [owner]
        if places.row_numbers and isinstance(decoded, Decoded):
            columns = self._with_numbers(columns, decoded, places.row_numbers, held)
        for number in np.flatnonzero(columns["kind"] == CONVERTED).tolist():
            held.append(self._convert(columns[number], number, decoded, places))
        parts, orders = self._describe_parts(places)
        bags, owners, owned = self._bags_of(decoded, places, copies_ids, held)
        place = functools.partial(
            self._scratch.place,
            rows=decoded.rows.num_rows,
            each=places.each,
            first_step=places.first_step,
            targets=places.targets,
        )
        state, worst, moved = place(columns, bags, parts)
        if state > LEFT:
            how = "differs from its checksum (CRC-32)" if state == DIFFERS else "cannot be unpacked"
            raise DamagedPage(f"column {self._numbers[worst][0]!r}: a page {how}")
        if state == LEFT:
            left = np.flatnonzero(columns["state"] == LEFT)
            rest = columns[left]
            for into, number in zip(rest, left.tolist(), strict=True):
                held.append(self._convert(into, number, decoded, places))
            place(rest, _NO_BAGS, parts)
        del held, orders  # until now they owned what was moved
        return MovedRows(moved, owners, owned, decoded.rows.schema.metadata == LOST)

    @staticmethod
    def _with_numbers(
        columns: npt.NDArray[np.void], decoded: Decoded, where: tuple[int, int], held: list[Any]
    ) -> npt.NDArray[np.void]:
        """Returns the columns, and one with the number of each row among all rows that are read."""
        numbers = np.arange(decoded.rows.num_rows, dtype=np.uint32)
        numbers += np.uint32(decoded.task.first)
        held.append(numbers)
        one = np.zeros(1, columns.dtype)
        one["kind"], one["values"], (one["block"], one["offset"]) = (
            WORDS,
            numbers.ctypes.data,
            where,
        )
        return np.concatenate([columns, one])

    @property
    def _scratch(self) -> Scratch:
        """The memory of this thread."""
        if not hasattr(self._threads, "scratch"):
            self._threads.scratch = Scratch()
        scratch: Scratch = self._threads.scratch
        return scratch

    def _layout_of(self, decoded: Decoded | MadeRows) -> NumberColumns:
        rows, layout = decoded.rows, self._layout
        stored = () if isinstance(rows, pa.Table) else rows.stored
        if layout is None or layout.stored != stored or not layout.schema.equals(rows.schema):
            layout = self._layout = NumberColumns(rows.schema, self._columns, stored)
        return layout

    def _convert(
        self, into: np.void, number: int, decoded: Decoded | MadeRows, places: Places
    ) -> npt.NDArray[Any]:
        """Converts the needed values of a column that cannot be moved as they are stored. Sets where they are."""
        (name, kind), (low, high) = self._numbers[number], places.bounds
        column = decoded.rows.column(name).slice(low, high - low)
        try:
            array = filled_numbers(name, column, kind, self._columns.fill.get(name))
        except ValueRefused as refused:
            raise self._named(refused, decoded, name, low) from None
        if len(array) < decoded.rows.num_rows:
            whole = np.zeros(decoded.rows.num_rows, kind)
            whole[low:high] = array
            array = whole
        into["pages"], into["values"], into["must_be_finite"] = 0, array.ctypes.data, 0
        into["kind"], into["skip"], into["state"] = WORDS, 0, PLACED
        return array

    def _named(
        self, refused: ValueRefused, decoded: Decoded | MadeRows, name: str, first: int
    ) -> ColumnError:
        """Returns the error for a value among the rows from `first` on."""
        read, row = decoded.origin(first + (refused.at or 0))
        return ColumnError(refused.message(self._describe(read), name, {refused.at: row}))

    def _bags_of(
        self, decoded: Decoded | MadeRows, places: Places, copies_ids: bool, held: list[Any]
    ) -> tuple[npt.NDArray[np.void], list[Any], int]:
        """Returns the bags of each column, what will own their ids, and the bytes of these. `held` gets what must live
        until the bags are placed."""
        names, (low, high) = self._columns.stored_bags, places.bounds
        described, owners, owned = [], [], 0
        for name, where in zip(names, places.bags.tolist(), strict=True):
            column = decoded.rows.column(name).slice(low, high - low)
            try:
                bags = stored_bags(column, self._columns.value_kind(name))
            except ValueRefused as refused:
                raise self._named(refused, decoded, name, low) from None
            size = bags.begins.itemsize
            begins, ends = (
                (array.ctypes.data - low * size) % 2**64 for array in (bags.begins, bags.ends)
            )
            line = np.empty(0, np.int32)
            if copies_ids and name not in self._columns.histories:
                line = self._buffers.take_line(max(1, bags.nbytes // 4), np.int32)
            address = line.ctypes.data if len(line) else 0
            offsets = begins, ends, size == 8, bags.unit
            described.append((*offsets, bags.ids.ctypes.data, address, line.nbytes, *where))
            held.append(bags)
            owners.append(line if len(line) else bags.ids)
            owned += bags.nbytes
        return np.array(described, BAGS), owners, owned
