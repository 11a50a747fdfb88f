"""Decides which rows come in which order for which rank: `RowsPlan`. It uses numpy and does no I/O.

The order is a contract. It depends only on the row groups of a table's version, the seed, the epoch, the batch size,
the number of streams and the window. It does not depend on knobs, workers, ranks, or where a run was resumed.

1. An epoch permutes the row groups and cuts the sequence of their rows into S equal ranges, the *streams*. Every second
   stream takes its row groups in reverse order. So two streams that share a row group at a cut need it at the same
   time, and one read serves both.
2. A stream is cut into *windows* of at most `window_rows` rows. A window holds as many whole row groups as fit. A
   larger row group is cut into equal pieces. The rows of a window are shuffled among themselves. The first three
   windows are smaller: an eighth, a quarter and half as long at most.
3. Global batch k holds the k-th B/S rows of every stream, in the order of the streams. Rank r of R takes its rows from
   rB/R to (r+1)B/R. If R divides S, these are whole streams. If R is a multiple of S that divides B, they are a part of
   one stream's rows. So every rank takes the same number of steps, and the global batches are the same for any such R.
   Ranks that share a stream each read all of it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.common.errors import UsageError
from sluice.common.number_checks import is_whole
from sluice.common.suggest import NamedFields
from sluice.ingest.choices import LAST, WINDOW_ROWS
from sluice.ingest.permutations import permutation, permutation_length, window_halves

STREAMS = 8
"""The default number of streams, at most. More streams mix rows better but cost more memory and processor time."""
SLICE_ROWS = 8192
"""The rows of a call of a function over rows: few enough for several workers to share a row group, and many enough to
hide a call's cost."""
_LISTED_RANKS = 64
"""Error messages list the possible numbers of ranks up to this number."""
_SHORT_WINDOWS = 3
"""The first windows of a stream are shorter: an eighth, a quarter and half of the size."""


class PlanError(UsageError):
    """A plan is invalid, or a position belongs to another plan. The message names the value and what to do."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows `start` to `stop` of one row group."""

    file: int
    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of one stream that are shuffled among themselves."""

    stream: int
    number: int
    first: int
    """The number of rows of the stream before this window."""
    slices: tuple[Slice, ...]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.slices)


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Rows `start` to `stop` of a row group, which become the rows of a window from row `at` on. `window` is the
    window's index in `EpochSchedule.windows`."""

    window: int
    at: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Read:
    """One row group to decode once, for all its parts."""

    file: int
    group: int
    rows: int
    parts: tuple[WindowPart, ...]
    first: int = 0
    """The number in the row group of the first row. Not 0 in a piece of a read."""
    pages: Any = field(default=None, compare=False, repr=False)
    """The `PageTable` of a piece, which says where the file has its pages. None: all pages are read."""

    def origin(self, row: int) -> tuple[Read, int]:
        """Returns this read, and the number in the row group of one of its rows."""
        return self, self.first + row

    def cut_at(self, cuts: Sequence[int]) -> list[Read]:
        """Returns the pieces between some rows, in the order in which batches need them."""
        pieces = [self.piece(start, stop) for start, stop in itertools.pairwise(cuts)]
        pieces = [piece for piece in pieces if piece.parts]
        return sorted(pieces, key=lambda piece: min(part.window for part in piece.parts))

    def piece(self, start: int, stop: int) -> Read:
        """Returns the read of its rows `start` to `stop` alone. The piece counts its rows from 0. It also has a part
        without rows that begins there, as a rank without rows needs it."""
        parts = (
            WindowPart(
                part.window,
                part.at + max(0, start - part.start),
                max(start, part.start) - start,
                min(stop, part.stop) - start,
            )
            for part in self.parts
            if start <= part.start < stop or part.start < start < part.stop
        )
        return replace(
            self,
            rows=stop - start,
            parts=tuple(parts),
            first=self.first + start,
        )


@dataclass(frozen=True)
class EpochSchedule:
    """One rank's part of an epoch, starting with `step`. Windows and reads are in the order of need."""

    epoch: int
    step: int
    streams: tuple[int, ...]
    windows: tuple[Window, ...]
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The epoch and the step of the next batch. A checkpoint of the order needs no more."""

    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise PlanError(
                f"position {self.epoch}/{self.step}: an epoch and a step are counted from 0"
            )


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """A rank's share of each batch. It reads the streams of rank `reader` among `readers` ranks, and takes part `part`
    of `parts` of their rows."""

    reader: int
    readers: int
    part: int
    parts: int
    rows: int
    """The number of rows of a batch that the rank takes."""

    @property
    def bounds(self) -> slice:
        """The rows that it takes among those that it reads for a batch."""
        return slice(self.part * self.rows, (self.part + 1) * self.rows)


def default_streams(batch_size: int) -> int:
    """Returns the default number of streams. It always divides the batch size."""
    return math.gcd(batch_size, STREAMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(NamedFields):
    """The order of rows. A state with another order is refused on resuming."""

    shuffle: bool = True
    """False: rows come as they are stored."""
    last: str = "drop"
    """What happens to rows that do not fill a batch at an epoch's end. `drop` skips them (other rows in each epoch).
    `pad` fills the batch with rows of weight 0."""
    window_rows: int | None = None
    """The rows of a stream that are mixed with each other; None: 32,768. More rows mix better and take more memory."""
    streams: int | None = None
    """The parts of an epoch from which every batch takes rows; None: the largest power of two up to 8 that divides the
    batch size. Ranks share the same global batches if their number divides `streams`, or is a multiple of it that
    divides the batch size."""


HUGE_ROWS = 500_000
"""A first batch waits for seconds if a row group with more rows is read whole."""
_SETTINGS = ("batch_size", "seed", "streams", "window_rows", "shuffle", "last")
"""What the order of rows depends on, besides the row groups. A state has them, so their order never changes."""


@dataclass(frozen=True, kw_only=True)
class RowsPlan:
    """The order of rows for one table version, by the rules of this module's docstring."""

    groups: tuple[tuple[int, ...], ...]
    """The number of rows of each row group, file by file."""
    batch_size: int
    """The number of rows of a global batch, over all ranks."""
    seed: int = 0
    streams: int = STREAMS
    window_rows: int = WINDOW_ROWS
    shuffle: bool = True
    last: str = "drop"
    """What happens to rows that do not fill a batch: `drop` skips them, `pad` fills the batch with rows of weight 0."""
    rows: int = field(init=False)

    @classmethod
    def of(
        cls, order: Order, groups: tuple[tuple[int, ...], ...], batch_size: int, seed: int
    ) -> RowsPlan:
        given = {name: value for name, value in asdict(order).items() if value is not None}
        return cls(
            groups=groups,
            batch_size=batch_size,
            seed=seed,
            **{"streams": default_streams(batch_size), **given},
        )

    @functools.cached_property
    def largest_group(self) -> int:
        """The rows of the largest row group."""
        return max(itertools.chain(*self.groups), default=0)

    @property
    def huge_group(self) -> int:
        """The rows of the largest row group, if it is so large that a first batch waits for seconds. Otherwise 0."""
        return self.largest_group if self.largest_group > HUGE_ROWS else 0

    def describe_huge_group(self) -> str:
        """Returns a warning about huge row groups, if there are any, with what to do."""
        return (
            f"a row group has {self.huge_group:,} rows, so the first batch comes late and memory is short; write the "
            "files with smaller ones (pyarrow: row_group_size=32_768)"
        )

    def __post_init__(self) -> None:
        for name in ("batch_size", "streams", "window_rows"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise PlanError(f"{name}: {value!r} is not a positive whole number")
        if self.last not in LAST:
            raise PlanError(f"last: {self.last!r} is none of {', '.join(LAST)}")
        if any(n < 0 for counts in self.groups for n in counts):
            raise PlanError("a row group with a negative number of rows")
        object.__setattr__(self, "rows", sum(sum(counts) for counts in self.groups))
        if self.batch_size % self.streams:
            raise PlanError(
                f"batch_size {self.batch_size} is not a multiple of the {self.streams} streams: leave "
                f"streams out, or take {default_streams(self.batch_size)}"
            )
        if not self.rows:
            raise PlanError("there are no rows to read")
        if not self.steps:
            most = self.rows // self.streams * self.streams
            better = f"take at most {most}" if most else f"take fewer streams than {self.streams}"
            raise PlanError(
                f"batch_size {self.batch_size} is larger than an epoch of {self.rows} rows: {better}, or "
                "last='pad'"
            )

    @property
    def steps(self) -> int:
        """The number of batches of an epoch, the same on every rank."""
        return (
            self.rows // self.batch_size
            if self.last == "drop"
            else -(-self.rows // self.batch_size)
        )

    @property
    def stream_rows(self) -> int:
        """The number of rows that one stream gives to a batch."""
        return self.batch_size // self.streams

    @property
    def used(self) -> int:
        """The number of rows of the table that an epoch delivers."""
        return min(self.rows, self.steps * self.batch_size)

    @property
    def widest(self) -> int:
        """The most rows that a window can have."""
        return min(self.window_rows, -(-self.used // self.streams))

    @property
    def dropped(self) -> int:
        """The number of rows that an epoch skips. With shuffle, each epoch skips other rows."""
        return self.rows - self.used

    def can_share(self, ranks: int) -> bool:
        """Whether `ranks` ranks can share the batches."""
        return ranks > 0 and (
            self.streams % ranks == 0
            or (ranks % self.streams == 0 and self.batch_size % ranks == 0)
        )

    def share_of(self, rank: int, ranks: int) -> RankShare:
        """Returns what one of `ranks` ranks reads and takes. Raises PlanError if they cannot share the batches."""
        if not self.can_share(ranks):
            fits = [str(n) for n in range(1, _LISTED_RANKS + 1) if self.can_share(n)]
            raise PlanError(
                f"{ranks} ranks cannot share batches of {self.batch_size} rows out of {self.streams} "
                f"streams: take {', '.join(fits)} ranks"
            )
        if not 0 <= rank < ranks:
            raise PlanError(f"rank {rank} is outside 0 to {ranks - 1}")
        parts = max(1, ranks // self.streams)
        return RankShare(
            reader=rank // parts,
            readers=ranks // parts,
            part=rank % parts,
            rows=self.batch_size // ranks,
            parts=parts,
        )

    def streams_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Returns the streams that a rank reads."""
        share = self.share_of(rank, ranks)
        each = self.streams // share.readers
        return tuple(range(share.reader * each, (share.reader + 1) * each))

    def bounds(self, stream: int) -> tuple[int, int]:
        """Returns the first row of a stream and the row after its last, among the permuted rows of an epoch."""
        return self.used * stream // self.streams, self.used * (stream + 1) // self.streams

    def windows(self, epoch: int, streams: tuple[int, ...]) -> Iterator[Window]:
        """Yields the windows of some streams in an epoch, stream by stream."""
        flat = self._filled_groups
        order = np.arange(len(flat))
        if self.shuffle:
            order = permutation(len(flat), "groups", self.seed, epoch)
        ends = np.cumsum([flat[i][2] for i in order])
        for stream in streams:
            low, high = self.bounds(stream)
            slices = []
            at = int(np.searchsorted(ends, low, side="right"))
            while low < high:
                file, group, rows = flat[order[at]]
                start = int(ends[at]) - rows
                stop = min(int(ends[at]), high)
                slices.append(Slice(file, group, low - start, stop - start))
                low = stop
                at += 1
            if self.shuffle and stream % 2:
                slices.reverse()
            yield from self._cut_windows(stream, slices)

    @property
    def _filled_groups(self) -> list[tuple[int, int, int]]:
        """The file, the number in it and the rows of each row group that has rows."""
        return [
            (f, g, n) for f, counts in enumerate(self.groups) for g, n in enumerate(counts) if n
        ]

    def _cut_windows(self, stream: int, slices: list[Slice]) -> Iterator[Window]:
        """Yields the windows of a stream, each with as many slices as fit."""
        number = first = rows = 0
        in_window: list[Slice] = []
        for whole in slices:
            # A slice above the limit is cut into equal pieces.
            count = -(-whole.rows // self._window_limit(number))
            cuts = [whole.start + whole.rows * n // count for n in range(count + 1)]
            for start, stop in itertools.pairwise(cuts):
                piece = Slice(whole.file, whole.group, start, stop)
                if in_window and rows + piece.rows > self._window_limit(number):
                    yield Window(stream, number, first, tuple(in_window))
                    number += 1
                    first += rows
                    in_window = []
                    rows = 0
                in_window.append(piece)
                rows += piece.rows
        if in_window:
            yield Window(stream, number, first, tuple(in_window))

    def _window_limit(self, number: int) -> int:
        """Returns the most rows of window `number` of a stream. The first windows are small, so that the first batch
        comes early."""
        early = max(self.stream_rows, self.window_rows >> max(0, _SHORT_WINDOWS - number))
        return min(self.window_rows, early)

    def halves(
        self, epoch: int, window: Window
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]] | None:
        """Returns two permutations, each at least as long as the window. The window's order is the first applied to the
        second, without the numbers beyond the window (`compose_order`). None: rows come as they are stored."""
        if not self.shuffle:
            return None
        return window_halves(window.rows, self.seed, epoch, window.stream, window.number)

    def order_sizes(self) -> tuple[int, ...]:
        """Returns the lengths of the permutations that are combined into the windows' orders."""
        most = {
            min(self._window_limit(number), self.widest) for number in range(_SHORT_WINDOWS + 1)
        }
        return tuple(sorted({permutation_length(n) for n in most})) if self.shuffle else ()

    def schedule(self, epoch: int, rank: int = 0, ranks: int = 1, step: int = 0) -> EpochSchedule:
        """Returns a rank's windows and reads from a step of an epoch to its end.

        A rank without rows left still needs a batch of padding. So it gets one window without rows."""
        if not 0 <= step <= self.steps:
            raise PlanError(f"step {step} is outside an epoch of {self.steps} steps")
        streams = self.streams_of(rank, ranks)
        done = step * self.stream_rows
        windows = sorted(
            (w for w in self.windows(epoch, streams) if w.first + w.rows > done),
            key=lambda w: (w.first, w.stream),
        )
        if not windows and step < self.steps:
            file, group, _ = self._filled_groups[0]
            windows = [Window(streams[0], 0, done, (Slice(file, group, 0, 0),))]
        return EpochSchedule(epoch, step, streams, tuple(windows), tuple(self._reads(windows)))

    def _reads(self, windows: list[Window]) -> list[Read]:
        """Plans one read for all parts of a row group that are needed at about the same time."""
        parts: dict[tuple[int, int], list[WindowPart]] = {}
        for index, window in enumerate(windows):
            at = 0
            for piece in window.slices:
                of_group = parts.setdefault((piece.file, piece.group), [])
                of_group.append(WindowPart(index, at, piece.start, piece.stop))
                at += piece.rows
        reads = [
            Read(file, group, self.groups[file][group], together)
            for (file, group), of_group in parts.items()
            for together in self._needed_together(windows, of_group)
        ]
        return sorted(reads, key=lambda read: (read.parts[0].window, read.parts[0].at))

    def _needed_together(
        self, windows: Sequence[Window], parts: Sequence[WindowPart]
    ) -> list[tuple[WindowPart, ...]]:
        """Returns parts of a row group that are needed at about the same time. `parts` are in the order of need."""
        gaps = np.diff([windows[part.window].first for part in parts])
        cuts = [0, *(1 + np.flatnonzero(gaps > self.window_rows)).tolist(), len(parts)]
        return [tuple(parts[begin:end]) for begin, end in itertools.pairwise(cuts)]

    def reads_of(
        self, schedule: EpochSchedule, cut: Callable[[Read], Sequence[Read]]
    ) -> Iterator[Read]:
        """Yields what `cut` makes of each read, in the order in which batches need it. A piece is read again for rows
        that are needed much later, so that these do not wait in memory."""
        waiting: list[tuple[int, int, Read]] = []
        number = itertools.count()
        for read in schedule.reads:
            while waiting and waiting[0][0] < read.parts[0].window:
                yield heappop(waiting)[-1]
            for piece in cut(read):
                for parts in self._needed_together(schedule.windows, piece.parts):
                    due = parts[0].window, next(number)
                    heappush(waiting, (*due, replace(piece, parts=parts)))
        while waiting:
            yield heappop(waiting)[-1]

    @property
    def digest(self) -> str:
        """A hash of everything that the order depends on, except epoch and step."""
        text = json.dumps([self.groups, *(getattr(self, name) for name in _SETTINGS)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def state(self, position: Position) -> dict[str, Any]:
        """Returns the position as a dict for JSON, with the values that a resumed run must share."""
        return {"epoch": position.epoch, "step": position.step, **self._identity}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Returns the position in `state`. Raises PlanError, with the differences, if it belongs to another plan."""
        differences = differences_of(state, self._identity)
        if differences:
            # If only the hash differs, the message says what it covers, because the hash would not help the user.
            if len(differences) == 1 and state.get("plan") != self.digest:
                differences = ["the row groups have other numbers of rows"]
            raise PlanError(
                "this state belongs to another order of rows (" + "; ".join(differences) + ")"
            )
        position = Position(int(state["epoch"]), int(state["step"]))
        if position.step > self.steps:
            raise PlanError(f"step {position.step} is outside an epoch of {self.steps} steps")
        return position if position.step < self.steps else Position(position.epoch + 1, 0)

    @functools.cached_property
    def _identity(self) -> Mapping[str, Any]:
        # Some trainers ask for a state after each batch, and a table may have a million row groups.
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "rows": self.rows,
            "row_groups": sum(len(counts) for counts in self.groups),
            "plan": self.digest,
        }


def differences_of(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns the values in which a state differs from the own ones."""
    return [
        f"{name}: {state.get(name)!r} in the state, {value!r} here"
        for name, value in own.items()
        if state.get(name) != value
    ]


def chain(digest: str, step: int, content: int) -> str:
    """Returns the order hash after one more batch: a hash of the previous hash, the batch's step and its checksum."""
    return hashlib.blake2b(f"{digest}/{step}/{content}".encode(), digest_size=8).hexdigest()
