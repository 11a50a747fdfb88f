"""Quarantines rows of one rank: `Quarantine` finds the rows of the table that a failure affects, and lists them.
`Errors` says how many rows may be quarantined before the run stops.

A quarantined row stays in its batch with weight 0. If a row group cannot be read, all its rows are quarantined. Zeros
take their place, and their weights become 0.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa

from sluice.common.errors import RunFailure
from sluice.etl.schema import abridged
from sluice.ingest.choices import PROGRAM_ERRORS, Errors
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.errors import Closed
from sluice.ingest.flow.place_rows import compose_order
from sluice.ingest.row_order import RankShare, Read, RowsPlan, Window

if TYPE_CHECKING:
    from sluice.ingest.stages.batch import BatchSeries
    from sluice.ingest.stages.taken_rows import TakenRows


Result = TypeVar("Result")

_REASON_LENGTH = 500  # characters of an error's text to keep for each row


class QuarantineError(RunFailure):
    """`Errors` does not allow to quarantine these rows, so the run stops. The message names file, row group, rows,
    reason and option."""


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """Returns the names of an error's class and its bases. A worker process sends the same for its errors."""
    kinds = getattr(error, "kinds", None)
    return tuple(kinds) if kinds else tuple(kind.__name__ for kind in type(error).__mro__)


class Quarantine:
    """Finds the rows of the table that a failure affects, and lists them in a file. All stages of one rank share it."""

    def __init__(self, errors: Errors, origins: Any = None, path: Callable[[int], str] = str):
        """`origins` are the `Origins` of the rows in batches. `path` returns the path of a file by its number."""
        self.errors = errors
        self._origins, self._file_path = origins, path
        self._path = os.fspath(errors.quarantine)
        self._lock = threading.RLock()
        self._seen = self._quarantined = 0
        self._reasons: Counter[str] = Counter()
        self._descriptor = -1
        self._bad_rows: dict[tuple[int, int], set[int]] = {}
        """The rows with invalid values, and those that could not be read, for each row group."""

    @property
    def allowed(self) -> bool:
        """Whether bad rows are quarantined. Otherwise an error ends the run."""
        return self.errors.on_error == "quarantine"

    def quarantine_rows(
        self, error: BaseException, stage: str, epoch: int, step: int, rows: Sequence[int]
    ) -> None:
        """Quarantines rows of a batch. Padding rows do not count. Raises QuarantineError from `error` if `Errors` does
        not allow it."""
        origins = self._origins.batch(epoch, step)
        groups: dict[tuple[int, int], list[int]] = {}
        for origin in filter(None, (origins[row] for row in rows)):
            groups.setdefault(origin[:2], []).append(origin.row)
        for group, numbers in groups.items():
            self.add(error, stage, group, numbers)

    def replace_group(
        self, error: Exception, read: Read | TakenRows, schema: pa.Schema
    ) -> pa.Table:
        """Quarantines a row group that cannot be read, or a piece of one. Returns a table of zeros in its place.
        Rows that are read twice count once. Raises the error if rows may not be quarantined."""
        if not self.allowed:
            raise error
        self._add_once(error, "read", read, range(read.rows))
        return pa.table([_zeros(field.type, read.rows) for field in schema], schema=schema)

    def replace_rows(
        self,
        error: ColumnError,
        attempt: Callable[[int, int], pa.Table] | None,
        read: Read | TakenRows,
        schema: pa.Schema,
        stage: str = "read",
    ) -> pa.Table:
        """Quarantines the rows on which `attempt` fails. Returns the row group with zeros in these rows. Without an
        `attempt`, quarantines the row group. Raises the `error` of the row group if no row may be quarantined, or if no
        row is the cause."""
        if PROGRAM_ERRORS.intersection(kinds_of(error.__cause__ or error)):
            raise error
        if attempt is None or not self.allowed:
            return self.replace_group(error, read, schema)
        try:
            good, bad = isolate(attempt, read.rows, self.errors.max_rows)
        except ColumnError as too_many:
            # More rows fail than may be quarantined, so this ends the run.
            return self.replace_group(too_many, read, schema)
        for row, wrong in bad:
            self._add_once(wrong, stage, read, [row])
        pieces = {start: table for start, _, table in good}
        here = good[0][2].schema if good else schema  # types of numbers may differ between files
        pieces |= {
            row: pa.table([_zeros(field.type, 1) for field in here], schema=here) for row, _ in bad
        }
        return pa.concat_tables([pieces[start] for start in sorted(pieces)])

    def _add_once(
        self, error: Exception, stage: str, read: Read | TakenRows, rows: Iterable[int]
    ) -> None:
        """Quarantines those of these rows that are not quarantined yet."""
        groups: dict[tuple[int, int], set[int]] = {}
        for whole, row in map(read.origin, rows):
            groups.setdefault((whole.file, whole.group), set()).add(row)
        with self._lock:
            for group, numbers in groups.items():
                known = self._bad_rows.setdefault(group, set())
                if lost := sorted(numbers - known):
                    self.add(error, stage, group, lost)
                    known.update(lost)

    def zero_lost_weights(self, series: BatchSeries, columns: Columns) -> None:
        """Sets the weight to 0 for rows that could not be read, and quarantines rows with an invalid weight. With a
        negative weight, a model would learn the opposite. With NaN, it would learn nothing."""
        epoch = series.schedule.epoch
        for step, weights in enumerate(series.weights, series.step):
            if columns.weight and not (
                weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf
            ):
                wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
                error = ColumnError(
                    f"column {columns.weight!r} holds {weights[wrong[0]]:g}, which is no weight: weights must be "
                    "finite and 0 or more"
                )
                self.quarantine_rows(error, "batch", epoch, step, wrong.tolist())
                weights[wrong] = 0
            lost = self.lost_rows(epoch, step)
            if lost:
                weights[lost] = 0
        self.count_rows(sum(series.rows))

    def replace_non_finite(self, series: BatchSeries, columns: Columns) -> None:
        """Quarantines rows that hold NaN or infinity, from a file or a transform, because the loss would become NaN.
        Such numbers become 0, also in rows with weight 0."""
        if not self.errors.finite or np.isfinite(series.floats).all():
            return
        batches = zip(series.floats, series.weights, strict=True)
        for step, (floats, weights) in enumerate(batches, series.step):
            bad = ~np.isfinite(floats)
            for column in np.flatnonzero(bad.any(axis=1)):
                rows = np.flatnonzero(bad[column] & ~bad[:column].any(axis=0))
                rows = rows[weights[rows] != 0]
                name = columns.floats[column]
                value = floats[column, rows[0]] if len(rows) else 0
                error = ColumnError(
                    f'column {name!r} holds {value:g}: fill it (op = "fill" in a spec, or fill='
                    f"{{{name!r}: 0}}), correct the transform that made it, or use Errors(finite=False) "
                    "to keep such numbers"
                )
                self.quarantine_rows(error, "batch", series.schedule.epoch, step, rows.tolist())
            floats[bad] = 0
            weights[bad.any(axis=0)] = 0

    def lost_rows(self, epoch: int, step: int) -> list[int]:
        """Returns the rows of a batch that could not be read."""
        if not self._bad_rows:
            return []
        return [
            n
            for n, origin in enumerate(self._origins.batch(epoch, step))
            if origin is not None and origin.row in self._bad_rows.get(origin[:2], ())
        ]

    def count_rows(self, rows: int) -> None:
        """Counts loaded rows. Raises QuarantineError if the rate is too high, which may happen when the probation
        ends."""
        with self._lock:
            self._seen += rows
            objection = self.errors.objection(rows_seen=self._seen, rows_aside=self._quarantined)
        if objection:
            raise QuarantineError(f"{objection}; they are listed in {self._path}")

    def add(
        self, error: BaseException, stage: str, group: tuple[int, int], rows: Iterable[int]
    ) -> None:
        """Quarantines `rows` of a row group (numbers within it), or raises QuarantineError from `error`. `group` is its
        file, and its number there."""
        rows, file, row_group = list(rows), self._file_path(group[0]), group[1]
        kind = getattr(error, "type", type(error).__name__)
        text = str(getattr(error, "text", error))
        with self._lock:
            objection = self.errors.objection(
                rows_seen=self._seen + len(rows),
                rows_aside=self._quarantined + len(rows),
                kinds=kinds_of(error),
            )
            if objection is None:
                self._quarantined += len(rows)
                self._seen += len(rows)
                self._reasons[f"{stage}: {kind}"] += len(rows)
                self._write(
                    [
                        {
                            "stage": stage,
                            "file": file,
                            "row_group": row_group,
                            "row": row,
                            "type": kind,
                            "reason": text[:_REASON_LENGTH],
                        }
                        for row in rows
                    ]
                )
                return
        which = "row" if len(rows) == 1 else "rows"
        raise QuarantineError(
            f"{file} row group {row_group} {which} {abridged(rows, 5)}: {stage} failed: {kind}: "
            f"{text[:_REASON_LENGTH]} ({objection})"
        ) from error

    def summary(self) -> dict[str, Any]:
        """Returns a summary for the run's last line and its report."""
        with self._lock:
            return {
                "rows_set_aside": self._quarantined,
                "reasons": dict(self._reasons.most_common()),
                "file": self._path if self._quarantined else None,
            }

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Writes lines at once, so that they survive if the run is killed. If the list cannot be written, the run
        stops, because no row may be skipped without being listed."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise QuarantineError(
                f"{self._path}: {len(lines)} quarantined rows cannot be listed there "
                f"({error.strerror}); free some space, or choose another file"
            ) from None


def _zeros(kind: pa.DataType, rows: int) -> pa.Array:
    """Returns `rows` empty values of a type: 0, false, an empty list, no bytes, or a missing text."""
    is_a, value = pa.types, cast(Any, None)
    if is_a.is_list(kind) or is_a.is_large_list(kind):
        value = []
    elif is_a.is_binary(kind) or is_a.is_large_binary(kind):
        value = b""
    elif is_a.is_boolean(kind):
        value = False
    else:
        inner = kind.value_type if is_a.is_dictionary(kind) else kind
        if is_a.is_primitive(inner) or is_a.is_decimal(inner):
            value = 0
    return pa.array([value] * rows, kind)


class Origin(NamedTuple):
    """A row of the table. `file` is the file's number in the plan, `row` the row's number within the row group."""

    file: int
    group: int
    row: int


class Origins:
    """Computes from the plan where the rows in one rank's batches come from."""

    def __init__(self, plan: RowsPlan, share: RankShare):
        self._plan = plan
        self._share = share
        self._streams = plan.streams_of(share.reader, share.readers)
        self._windows = functools.lru_cache(maxsize=2)(
            lambda epoch: [list(plan.windows(epoch, (stream,))) for stream in self._streams]
        )
        self.batch = functools.lru_cache(maxsize=8)(self._of_batch)
        """For (epoch, step): the origin of each row of the batch. None for a padding row."""

    def _of_batch(self, epoch: int, step: int) -> list[Origin | None]:
        each = self._plan.stream_rows
        low, high = step * each, (step + 1) * each
        origins: list[Origin | None] = []
        for windows in self._windows(epoch):
            rows = [
                row
                for window in windows
                if window.first < high and window.first + window.rows > low
                for row in self._rows(epoch, window, low, high)
            ]
            origins += rows + [None] * (each - len(rows))
        return origins[self._share.bounds]

    def _rows(self, epoch: int, window: Window, low: int, high: int) -> list[Origin]:
        """Returns the origins of a window's rows that lie from `low` to before `high` in its stream."""
        halves = self._plan.halves(epoch, window)
        first, last = max(low - window.first, 0), min(high - window.first, window.rows)
        wanted = np.arange(first, last)
        if halves is not None:
            wanted = compose_order(*halves, window.rows).view(np.int64)[first:last]
        starts = np.cumsum([0, *(s.rows for s in window.slices)])
        pieces = np.searchsorted(starts, wanted, side="right") - 1
        return [
            Origin(piece.file, piece.group, piece.start + int(n - starts[p]))
            for n, p in zip(wanted, pieces, strict=True)
            for piece in [window.slices[p]]
        ]


def isolate(
    attempt: Callable[[int, int], Result], rows: int, max_rows: int
) -> tuple[list[tuple[int, int, Result]], list[tuple[int, Exception]]]:
    """Finds the rows that make `attempt(start, stop)` raise, by halving ranges that fail.

    Returns the results of the good ranges, in order, and each bad row with its error. Errors of the program, and
    those of what was closed meanwhile, are raised at once. So is the error of the first bad row beyond `max_rows`."""
    good: list[tuple[int, int, Result]] = []
    bad: list[tuple[int, Exception]] = []
    ranges = [(0, rows)]
    while ranges:
        start, stop = ranges.pop()
        try:
            good.append((start, stop, attempt(start, stop)))
        except Closed:
            raise
        except Exception as error:
            if PROGRAM_ERRORS.intersection(kinds_of(error)) or (
                stop - start <= 1 and len(bad) >= max_rows
            ):
                raise
            if stop - start <= 1:
                bad.append((start, error))
            else:
                middle = (start + stop) // 2
                ranges += [(middle, stop), (start, middle)]
    return good, bad
