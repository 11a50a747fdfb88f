"""From decoded row groups to the places of their rows in batches: `Decoded`, `Gathering`, `Block`.

A batch lies feature by feature in memory. The rows of a window are moved once: a gather for each column, within what a
core's cache holds, and from there into the batches. So nothing but decoding and this one gather touches every value.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.bags import BagError, Bags, shuffled
from ingest.buffers import Buffers
from ingest.columns import ColumnError, Columns
from ingest.governor import Charge
from ingest.plan import Read, RowsPlan, Schedule, Window

CHUNK_ROWS = 65536
_TOGETHER = 13  # columns of a window that are gathered before they are put into batches: 1.6 MiB at 32,768 rows


@dataclass(frozen=True, slots=True)
class Task:
    """One read of an epoch."""

    schedule: Schedule
    read: Read


class Decoded:
    """The row group of one read. Its bytes are given back when all its parts are shuffled."""

    __slots__ = ("_charge", "_left", "_lock", "table", "task")

    def __init__(self, task: Task, table: pa.Table, charge: Charge):
        self.task, self.table, self._charge = task, table, charge
        self._left, self._lock = len(task.read.parts), threading.Lock()

    def part_done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.table = None
        self._charge.release()


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a row group: a part of a window."""

    decoded: Decoded
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Gathering:
    """A window whose rows have all been read."""

    schedule: Schedule
    window: Window
    pieces: tuple[Piece, ...]


class Chunk:
    """Memory of some consecutive batches: [batch, column, row] of floats and of ids."""

    __slots__ = ("__weakref__", "floats", "ids")

    def __init__(self, floats: npt.NDArray[Any], ids: npt.NDArray[Any]):
        self.floats, self.ids = floats, ids


class Chunks:
    """The chunks that are being filled. Each lives as long as a block that has rows in it."""

    def __init__(self, plan: RowsPlan, columns: Columns, ranks: int, buffers: Buffers):
        self.steps = chunk_steps(plan, ranks)
        self._floats = (self.steps, len(columns.floats), plan.batch_size // ranks)
        self._ids = (self.steps, len(columns.scalars), plan.batch_size // ranks)
        self.buffers = buffers
        self._lock = threading.Lock()
        self._chunks: weakref.WeakValueDictionary[tuple[int, int], Chunk] = weakref.WeakValueDictionary()

    def take(self, epoch: int, number: int) -> Chunk:
        with self._lock:
            chunk = self._chunks.get((epoch, number))
            if chunk is None:
                chunk = Chunk(self.buffers.take(self._floats, np.float32), self.buffers.take(self._ids, np.int32))
                self._chunks[epoch, number] = chunk
            return chunk


def chunk_steps(plan: RowsPlan, ranks: int) -> int:
    """Batches in a chunk."""
    return max(1, CHUNK_ROWS * ranks // plan.batch_size)


class Block:
    """A shuffled window. Its numbers lie in the batches that they are for, its bags still here."""

    __slots__ = ("_charge", "_left", "_lock", "_row_bytes", "bags", "chunks", "first", "nbytes", "rows", "schedule",
                 "window")

    def __init__(self, gathering: Gathering, first: int, *, chunks: Mapping[int, Chunk], bags: Mapping[str, Bags],
                 scalar_bytes: int, charge: Charge):
        """`first` is the row of the stream with which it begins: a resumed run may have used some before."""
        self.schedule, self.window, self.first = gathering.schedule, gathering.window, first
        self.rows = self._left = self.window.first + self.window.rows - first
        self.chunks, self.bags = chunks, bags
        self.nbytes = self.rows * scalar_bytes + sum(b.nbytes for b in bags.values())
        self._row_bytes = self.nbytes / max(1, self.rows)
        self._charge, self._lock = charge, threading.Lock()

    def taken(self, rows: int) -> None:
        """So many of its rows are part of finished batches now, which account for them."""
        with self._lock:
            self._left -= rows
            self._charge.correct(round(self._left * self._row_bytes))
            if not self._left:
                self.bags, self.chunks = {}, {}


def gatherings(decoded: Iterable[Decoded]) -> Iterator[Gathering]:
    """Windows in the order in which they are needed, as their last row group comes in."""
    for schedule, group in itertools.groupby(decoded, lambda d: d.task.schedule):
        pieces: list[list[tuple[int, Piece]]] = [[] for _ in schedule.windows]
        missing = [w.rows for w in schedule.windows]
        ready = 0
        for one in group:
            for part in one.task.read.parts:
                pieces[part.window].append((part.at, Piece(one, part.start, part.stop)))
                missing[part.window] -= part.stop - part.start
            while ready < len(missing) and not missing[ready]:
                ordered = tuple(piece for _, piece in sorted(pieces[ready], key=lambda p: p[0]))
                pieces[ready] = []
                ready += 1
                yield Gathering(schedule, schedule.windows[ready - 1], ordered)
                del ordered


@dataclass(frozen=True, slots=True)
class Place:
    """Where `steps` times `width` rows of a stream, from `start` on, go: into batches `step` to `step + steps` of a
    chunk, from row `at` on."""

    chunk: Chunk
    step: int
    steps: int
    at: int
    width: int
    start: int


class Gatherer:
    """One worker of the shuffle stage: from decoded columns to where the rows lie in batches.

    Some columns at a time, so that what is gathered stays in the core's own cache until it is put in its places."""

    def __init__(self, plan: RowsPlan, columns: Columns, chunks: Chunks, describe: Callable[[Read], str]):
        self._plan, self._columns, self._chunks, self._describe = plan, columns, chunks, describe
        self._scratch: dict[str, npt.NDArray[Any]] = {}

    def __call__(self, gathering: Gathering, charge: Charge) -> Block:
        window, columns, schedule = gathering.window, self._columns, gathering.schedule
        order = self._plan.order(schedule.epoch, window)
        first = max(window.first, schedule.step * self._plan.stream_rows)
        skipped = first - window.first
        chunks = self._chunks_of(schedule.epoch, first, window.first + window.rows)
        if order is None:
            self._copy(gathering, first, chunks)
        else:
            order = order[skipped:]
            places = self._places(schedule, window, (first, first + len(order)), chunks)
            for kind, names in (("floats", columns.floats), ("ids", columns.scalars)):
                self._gather(kind, names, gathering.pieces, order, places)
        bags = {}
        for name in columns.bags:
            bags[name] = self._bags(name, gathering.pieces, np.arange(skipped, window.rows) if skipped and order is None
                                    else order)
        for piece in gathering.pieces:
            piece.decoded.part_done()
        return Block(gathering, first, chunks=chunks, bags=bags, charge=charge,
                     scalar_bytes=4 * (len(columns.floats) + len(columns.scalars)))

    # ---- where

    def _chunks_of(self, epoch: int, first: int, last: int) -> dict[int, Chunk]:
        each, steps = self._plan.stream_rows, self._chunks.steps
        numbers = range(first // each // steps, (last - 1) // each // steps + 1) if last > first else ()
        return {number: self._chunks.take(epoch, number) for number in numbers}

    def _places(self, schedule: Schedule, window: Window, rows: tuple[int, int], chunks: Mapping[int, Chunk]
                ) -> list[Place]:
        """Of the rows of a stream from the first to before the last."""
        found: list[Place] = []
        each, most = self._plan.stream_rows, self._chunks.steps
        lane = schedule.streams.index(window.stream) * each
        row, last = rows
        while row < last:
            step, inside = divmod(row, each)
            number, local = divmod(step, most)
            steps = 1 if inside else max(1, min((last - row) // each, most - local))
            width = min(each - inside, last - row)
            found.append(Place(chunks[number], local, steps, lane + inside, width, row - rows[0]))
            row += steps * width
        return found

    # ---- numbers

    def _gather(self, kind: str, names: tuple[str, ...], pieces: tuple[Piece, ...], order: npt.NDArray[np.int64],
                places: list[Place]) -> None:
        dtype = np.dtype(np.float32 if kind == "floats" else np.int32)
        together = self._space(f"gathered {dtype}", (_TOGETHER, len(order)), dtype)
        source = self._source(names, pieces, dtype)
        for column in range(0, len(names), _TOGETHER):
            few = together[:min(_TOGETHER, len(names) - column)]
            # clip: written without a buffer in between
            np.take(source[column:column + len(few)], order, axis=1, out=few, mode="clip")
            _put(few, places, kind, column)

    def _source(self, names: tuple[str, ...], pieces: tuple[Piece, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The rows of some pieces, a row of the array for each column.

        Made by one call where Arrow's columns have its type: every call that lets other threads go on costs a wait
        for the interpreter's lock after it, and with a call a column those were a third of the stage's time."""
        blocks = [self._block(names, piece, dtype) for piece in pieces]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)

    def _block(self, names: tuple[str, ...], piece: Piece, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        part = piece.decoded.table.select(list(names)).slice(piece.start, piece.stop - piece.start)
        batches = part.to_batches()
        narrower = (pa.from_numpy_dtype(dtype), pa.int8(), pa.uint8(), pa.int16())  # what they become together
        if len(batches) == 1 and all(f.type in narrower for f in part.schema) and part.schema.types.count(narrower[0]) \
                and not any(c.null_count for c in batches[0].columns):
            together: npt.NDArray[Any] = batches[0].to_tensor(row_major=False).to_numpy()
            return together.T
        block = np.empty((len(names), part.num_rows), dtype)
        for row, name in enumerate(names):
            np.concatenate(self._arrays(name, (piece,), dtype), out=block[row], casting="unsafe")
        return block

    def _copy(self, gathering: Gathering, first: int, chunks: Mapping[int, Chunk]) -> None:
        """Without shuffling: every column straight to its places."""
        at = gathering.window.first
        for piece in gathering.pieces:
            start, stop = max(at, first), at + piece.stop - piece.start
            places = self._places(gathering.schedule, gathering.window, (start, stop), chunks)
            for kind, names in (("floats", self._columns.floats), ("ids", self._columns.scalars)):
                for column, name in enumerate(names):
                    arrays = self._arrays(name, (piece,), np.dtype(np.float32 if kind == "floats" else np.int32))
                    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                    _put(whole[None, start - at:], places, kind, column)
            at = stop

    def _arrays(self, name: str, pieces: tuple[Piece, ...], dtype: np.dtype[Any]) -> list[npt.NDArray[Any]]:
        """The rows of some pieces as Arrow holds them, without a copy."""
        arrays = []
        for piece in pieces:
            column = piece.decoded.table.column(name)
            if column.null_count:
                column = self._filled(name, piece, column)
            if piece.start or piece.stop != len(column):
                column = column.slice(piece.start, piece.stop - piece.start)
            for chunk in column.chunks:
                array = chunk.to_numpy(zero_copy_only=not pa.types.is_boolean(chunk.type))
                if dtype == np.int32 and not np.can_cast(array.dtype, np.int32):
                    self._check_range(name, piece, array)
                arrays.append(array)
        return arrays

    def _filled(self, name: str, piece: Piece, column: pa.ChunkedArray) -> pa.ChunkedArray:
        if name not in self._columns.fill:
            raise ColumnError(f"{self._describe(piece.decoded.task.read)}: column {name!r} has {column.null_count} "
                              "empty values; fill them in the spec (op = \"fill\"), or give the loader a fill")
        value = self._columns.fill[name]
        return column.fill_null(pa.scalar(value).cast(column.type))

    def _check_range(self, name: str, piece: Piece, array: npt.NDArray[Any]) -> None:
        """Wider ids than int32 may come, if their values fit."""
        limits = np.iinfo(np.int32)
        if len(array) and not limits.min <= array.min() <= array.max() <= limits.max:
            raise ColumnError(f"{self._describe(piece.decoded.task.read)}: column {name!r} has ids from "
                              f"{array.min()} to {array.max()}, which do not fit int32; hash or categorify it")

    def _space(self, purpose: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        space = self._scratch.get(purpose)
        if space is None or space.shape[1] < shape[1]:
            space = self._scratch[purpose] = np.empty(shape, dtype)
        return space[:, :shape[1]]

    # ---- bags

    def _bags(self, name: str, pieces: tuple[Piece, ...], order: npt.NDArray[np.int64] | None) -> Bags:
        arrays = [chunk for piece in pieces
                  for chunk in piece.decoded.table.column(name).slice(piece.start, piece.stop - piece.start).chunks]
        try:
            return shuffled(arrays, order, self._chunks.buffers)
        except BagError as error:
            raise ColumnError(f"{self._describe(pieces[0].decoded.task.read)}: column {name!r} has {error}") from None


def _put(columns: npt.NDArray[Any], places: Iterable[Place], kind: str, at: int) -> None:
    """Some columns of a stream's rows into their places, from column number `at` on."""
    count = len(columns)
    for place in places:
        target = getattr(place.chunk, kind)
        rows = columns[:, place.start:place.start + place.steps * place.width]
        target[place.step:place.step + place.steps, at:at + count, place.at:place.at + place.width] = \
            rows.reshape(count, place.steps, place.width).swapaxes(0, 1)
