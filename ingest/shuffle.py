"""From decoded row groups to shuffled blocks: `Decoded`, `Gathering`, `Block`.

A block holds a window of one stream, feature by feature, so that a batch is later cut out of it in slices. The rows
are moved once: one gather for each column, within what a core's cache holds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.buffers import Buffers
from ingest.columns import ColumnError, Columns
from ingest.governor import Charge
from ingest.plan import Read, RowsPlan, Schedule, Window


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


class Block:
    """A shuffled window: floats and ids, a row of the arrays for each column."""

    __slots__ = ("_charge", "_left", "_lock", "floats", "ids", "rows", "schedule", "window")

    def __init__(self, gathering: Gathering, floats: npt.NDArray[Any], ids: npt.NDArray[Any], charge: Charge):
        self.schedule, self.window = gathering.schedule, gathering.window
        self.floats, self.ids, self._charge = floats, ids, charge
        self.rows = self._left = gathering.window.rows
        self._lock = threading.Lock()

    def taken(self, rows: int) -> None:
        """So many of its rows are not needed any more. With the last of them the block gives its memory back."""
        with self._lock:
            self._left -= rows
            if self._left:
                return
        self.floats = self.ids = None  # type: ignore[assignment]
        self._charge.release()


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


class Gatherer:
    """One worker of the shuffle stage."""

    def __init__(self, plan: RowsPlan, columns: Columns, buffers: Buffers, describe: Callable[[Read], str]):
        self._plan, self._columns, self._buffers, self._describe = plan, columns, buffers, describe
        self._scratch: dict[str, npt.NDArray[Any]] = {}

    def __call__(self, gathering: Gathering, charge: Charge) -> Block:
        window, columns = gathering.window, self._columns
        order = self._plan.order(gathering.schedule.epoch, window)
        width = self._plan.widest
        floats = self._buffers.take((len(columns.floats), width), np.float32)
        ids = self._buffers.take((len(columns.sparse), width), np.int32)
        for block, names in ((floats, columns.floats), (ids, columns.sparse)):
            for row, name in enumerate(names):
                self._gather(name, gathering.pieces, order, block[row, :window.rows])
        for piece in gathering.pieces:
            piece.decoded.part_done()
        return Block(gathering, floats, ids, charge)

    def _gather(self, name: str, pieces: tuple[Piece, ...], order: npt.NDArray[np.int64] | None,
                out: npt.NDArray[Any]) -> None:
        arrays = [array for piece in pieces for array in self._arrays(name, piece)]
        if out.dtype == np.int32:
            for array in arrays:
                if not np.can_cast(array.dtype, np.int32):
                    self._check_range(name, pieces, array)
        if order is None:
            np.concatenate(arrays, out=out, casting="unsafe")
            return
        source = arrays[0]
        if len(arrays) > 1 or source.dtype != out.dtype:
            source = self._space(out)
            np.concatenate(arrays, out=source, casting="unsafe")
        np.take(source, order, out=out, mode="clip")  # clip: numpy then writes without a buffer in between

    def _check_range(self, name: str, pieces: tuple[Piece, ...], array: npt.NDArray[Any]) -> None:
        """Wider ids than the block holds may come, if their values fit."""
        limits = np.iinfo(np.int32)
        if len(array) and not limits.min <= array.min() <= array.max() <= limits.max:
            raise ColumnError(f"{self._describe(pieces[0].decoded.task.read)}: column {name!r} has ids from "
                              f"{array.min()} to {array.max()}, which do not fit int32; hash or categorify it")

    def _space(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        space = self._scratch.get(like.dtype.str)
        if space is None or len(space) < len(like):
            space = self._scratch[like.dtype.str] = np.empty(len(like), like.dtype)
        return space[:len(like)]

    def _arrays(self, name: str, piece: Piece) -> Iterator[npt.NDArray[Any]]:
        """The rows of a piece as Arrow holds them, without a copy."""
        column = piece.decoded.table.column(name)
        if column.null_count:
            raise ColumnError(f"{self._describe(piece.decoded.task.read)}: column {name!r} has {column.null_count} "
                              "empty values; fill them in the spec (op = \"fill\")")
        if piece.start or piece.stop != len(column):
            column = column.slice(piece.start, piece.stop - piece.start)
        for chunk in column.chunks:
            yield chunk.to_numpy(zero_copy_only=not pa.types.is_boolean(chunk.type))
