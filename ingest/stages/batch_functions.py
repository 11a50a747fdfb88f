"""Calls a transform's function on batches: `BatchFunctionCaller`. Rows on which the function fails are found by halving
the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.ingest.choices import PROGRAM_ERRORS
from sluice.ingest.columns import Columns, lengths_name
from sluice.ingest.errors import Closed, LoadingError
from sluice.ingest.process.matrix_function import MATRIX, MatrixFunction, by_column
from sluice.ingest.process.worker import WorkerCrashed
from sluice.ingest.stages.batch import BatchSeries
from sluice.ingest.stages.quarantine import Quarantine, isolate, kinds_of
from sluice.ingest.stages.transform import Arrays, Given, TransformError, may_write
from sluice.ingest.stages.transform_worker import TransformStage, TransformWorker


@dataclass(eq=False)
class BatchFunctionCaller:
    """Calls a function on batches, for one worker of the pool."""

    stage: TransformStage
    columns: Columns
    quarantine: Quarantine

    def __post_init__(self) -> None:
        self.worker = TransformWorker(self.stage)
        self.transform = self.stage.transform
        self.names = self.transform.reads
        """The columns that the function gets. Empty: all."""
        self._matrix = slice(0)
        """The columns among all floats that a function over a matrix gets where they lie."""
        if isinstance(self.stage.function, MatrixFunction):
            self.names = self.names or self.columns.dense
            self._matrix = self._find_matrix()
        known = self.columns.cardinalities
        self.cardinalities = {n: known[n] for n in self.names or known if n in known}
        """The known cardinalities of the columns that the function gets."""
        self._batch_copy: Arrays = {}

    def __call__(self, series: BatchSeries, number: int, arrays: Arrays, where: str) -> Given:
        in_thread, own = self.worker.choose_backend() == "thread", self._matrix
        in_place = bool(own.stop) and in_thread
        arrays = (
            {MATRIX: series.floats[number, own].T} if in_place else self._select_columns(arrays)
        )
        is_safe = not in_thread or self.transform.pure
        before = arrays if is_safe else self._copy_batch(arrays)
        try:
            given = self.worker.call_as_often(arrays, before, where)
        except (Closed, LoadingError):
            raise
        except BaseException as error:  # also sys.exit() in the function
            given = self._quarantine_failing_rows(error, series, number, before, where)
        return by_column(self.names, given[MATRIX]) if in_place and given else given

    def _find_matrix(self) -> slice:
        """Returns where the function's columns lie together, if it may write there."""
        floats, names, outputs = self.columns.floats, self.names, self.transform.outputs
        found = slice(0)
        if self.columns.weight not in names and (not outputs or outputs.keys() >= {*names}):
            for first in range(len(floats)):
                if floats[first : first + len(names)] == names:
                    found = slice(first, first + len(names))
        return found

    def _select_columns(self, arrays: Arrays) -> Arrays:
        """Returns the function's columns, in the order in which they are named."""
        if not self.names:
            return arrays
        missing = [name for name in self.names if name not in arrays]
        if missing:
            raise TransformError(
                f"transform {self.transform.name!r}: the table has no columns {missing}"
            )
        wanted = (
            part
            for name in (*self.names, *self.transform.added)
            for part in (name, lengths_name(name))
        )
        return {name: arrays[name] for name in wanted if name in arrays}

    def _copy_batch(self, arrays: Arrays) -> Arrays:
        """Copies the batch, because a function in a thread may write into it and then fail."""
        copies = dict(arrays)
        for name, array in arrays.items():
            if not may_write(self.transform, name):
                continue
            copy = self._batch_copy.get(name)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = self._batch_copy[name] = np.empty_like(array)
            np.copyto(copy, array)
            copies[name] = copy
        return copies

    def _quarantine_failing_rows(
        self, error: BaseException, series: BatchSeries, number: int, arrays: Arrays, where: str
    ) -> Given:
        """Returns the batch with weight 0 for the rows on which the function fails, which stay as they were. Raises
        QuarantineError if they may not be quarantined."""
        rows = series.floats.shape[2]
        weights = series.weights[number]
        attempted = 0

        def quarantine(error: BaseException, rows: Iterable[int]) -> None:
            self.quarantine.quarantine_rows(
                error,
                f"transform {self.transform.name!r}",
                series.schedule.epoch,
                series.step + number,
                [row for row in rows if weights[row]],  # no padding rows, and none twice
            )

        def attempt(start: int, stop: int) -> Arrays:
            nonlocal attempted
            attempted = start
            part = self._rows(arrays, start, stop)
            given = self.worker.call(part, f"{where}, rows {start} to {stop}") or {}
            # Copies, because the next call may overwrite a result.
            return {**part, **{name: np.array(array) for name, array in given.items()}}

        if isinstance(error, WorkerCrashed) or PROGRAM_ERRORS.intersection(kinds_of(error)):
            quarantine(error, range(rows))
            return self._join_rows(arrays, [], range(rows), weights)
        try:
            good, failed = isolate(attempt, rows, rows if self.quarantine.allowed else 0)
        except Closed:
            raise
        except BaseException as first:
            quarantine(first, [attempted])
            raise
        if not failed:  # no single row causes the error
            raise error
        by_error: dict[str, list[tuple[int, Exception]]] = {}
        for row, row_error in failed:
            by_error.setdefault(repr(row_error), []).append((row, row_error))
        for same in by_error.values():
            quarantine(same[0][1], [row for row, _ in same])
        return self._join_rows(arrays, good, [row for row, _ in failed], weights)

    def _join_rows(
        self,
        arrays: Arrays,
        good: Sequence[tuple[int, int, Arrays]],
        bad: Sequence[int],
        weights: npt.NDArray[Any],
    ) -> Arrays:
        """Joins the results of the good rows with the unchanged bad rows, which get weight 0."""
        parts = {start: part for start, _, part in good}
        parts |= {row: self._rows(arrays, row, row + 1) for row in bad}
        joined = {
            name: np.concatenate([np.asarray(parts[start][name]) for start in sorted(parts)])
            for name in arrays
        }
        weights[list(bad)] = 0
        if self.columns.weight in joined:
            joined[self.columns.weight][list(bad)] = 0
        return joined

    def _rows(self, arrays: Arrays, start: int, stop: int) -> Arrays:
        """Copies some rows."""
        part = {}
        for name, array in arrays.items():
            low, high = start, stop
            if name in self.columns.bags:
                ends = np.concatenate(([0], np.cumsum(arrays[lengths_name(name)])))
                low, high = int(ends[start]), int(ends[stop])
            part[name] = array[low:high].copy()
        return part
