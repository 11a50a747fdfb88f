"""Calls a transform's function on batches: `BatchFunctionCaller`. Rows on which the function fails are found by halving
the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.ingest.choices import PROGRAM_ERRORS
from sluice.ingest.errors import Closed, LoadingError
from sluice.ingest.process.matrix_function import MATRIX, by_column
from sluice.ingest.process.worker import WorkerCrashed
from sluice.ingest.stages.batch import BatchSeries, lengths_name
from sluice.ingest.stages.quarantine import isolate, kinds_of
from sluice.ingest.stages.transform import Arrays, Given, TransformError
from sluice.ingest.stages.transform_worker import TransformStage, TransformWorker

_LENGTHS = lengths_name("")


@dataclass(eq=False)
class BatchFunctionCaller:
    """Calls a function on batches, for one worker of the pool."""

    stage: TransformStage

    def __post_init__(self) -> None:
        self.worker = TransformWorker(self.stage)
        self._batch_copy: Arrays = {}

    def __call__(self, series: BatchSeries, number: int, arrays: Arrays, where: str) -> Given:
        in_thread, own = self.worker.choose_backend() == "thread", self.stage.matrix
        in_place = bool(own.stop) and in_thread
        arrays = (
            {MATRIX: series.floats[number, own].T} if in_place else self._select_columns(arrays)
        )
        is_safe = not in_thread or self.stage.transform.pure
        before = arrays if is_safe else self._copy_batch(arrays)
        try:
            given = self.worker.call_as_often(arrays, before, where)
        except (Closed, LoadingError):
            raise
        except BaseException as error:  # also sys.exit() in the function
            given = self._quarantine_failing_rows(error, series, number, before, where)
        return by_column(self.stage.names, given[MATRIX]) if in_place and given else given

    def _select_columns(self, arrays: Arrays) -> Arrays:
        """Returns the function's columns, in the order in which they are named."""
        stage = self.stage
        if not stage.names:
            return arrays
        missing = [name for name in stage.names if name not in arrays]
        if missing:
            raise TransformError(
                f"transform {stage.transform.name!r}: the table has no columns {missing}"
            )
        wanted = (
            part
            for name in (*stage.names, *stage.transform.added)
            for part in (name, lengths_name(name))
        )
        return {name: arrays[name] for name in wanted if name in arrays}

    def _copy_batch(self, arrays: Arrays) -> Arrays:
        """Copies the batch, because a function in a thread may write into it and then fail."""
        transform, copies = self.stage.transform, dict(arrays)
        for name, array in arrays.items():
            if (
                transform.outputs
                and name != MATRIX
                and name.removesuffix(_LENGTHS) not in transform.outputs
            ):
                continue  # the function cannot write there
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
        stage, rows = self.stage, series.floats.shape[2]
        weights = series.weights[number]
        attempted = 0

        def quarantine(error: BaseException, rows: Iterable[int]) -> None:
            stage.quarantine.quarantine_rows(
                error,
                f"transform {stage.transform.name!r}",
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
            good, failed = isolate(attempt, rows, rows if stage.quarantine.allowed else 0)
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
        if self.stage.columns.weight in joined:
            joined[self.stage.columns.weight][list(bad)] = 0
        return joined

    def _rows(self, arrays: Arrays, start: int, stop: int) -> Arrays:
        """Copies some rows."""
        part = {}
        for name, array in arrays.items():
            low, high = start, stop
            if name in self.stage.columns.bags:
                ends = np.concatenate(([0], np.cumsum(arrays[lengths_name(name)])))
                low, high = int(ends[start]), int(ends[stop])
            part[name] = array[low:high].copy()
        return part
