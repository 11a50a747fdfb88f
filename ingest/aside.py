"""Setting rows of one rank aside: `Aside` knows which rows of the table a failure concerns, and keeps their places.

A row that is set aside stays in its batch with weight 0. Of a row group that cannot be read all rows are: zeros are
read in its place, and whoever makes the batches asks here for their weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.batch import Stretch
from ingest.columns import ColumnError, Columns
from ingest.origins import Origin, Origins
from ingest.plan import Read
from ingest.quarantine import Quarantine


class Aside:
    """Stages share it."""

    def __init__(self, books: Quarantine, origins: Origins, path: Callable[[int], str]):
        """`path` names a file by its number."""
        self.books, self._origins, self._path = books, origins, path
        self._lock = threading.Lock()
        self._groups: set[tuple[int, int]] = set()

    @property
    def allowed(self) -> bool:
        return self.books.policy.on_error == "quarantine"

    def rows(self, error: BaseException, stage: str, epoch: int, step: int, rows: Sequence[int]) -> None:
        """Some rows of a batch; those that only fill it do not count. QuarantineError, from `error`, if the policy
        says so."""
        origins = self._origins.batch(epoch, step)
        groups: dict[tuple[int, int], list[int]] = {}
        for origin in filter(None, (origins[row] for row in rows)):
            groups.setdefault(origin[:2], []).append(origin.row)
        for (file, group), numbers in groups.items():
            self.books.admit(error, stage=stage, file=self._path(file), row_group=group, rows=numbers)

    def group(self, error: BaseException, read: Read, schema: pa.Schema) -> pa.Table:
        """A row group that cannot be read: what comes in its place. A group that is read twice counts once."""
        with self._lock:
            key = (read.file, read.group)
            if key not in self._groups:
                self.books.admit(error, stage="read", file=self._path(read.file), row_group=read.group,
                                 rows=range(read.rows))
                self._groups.add(key)
        return pa.table([_zeros(field.type, read.rows) for field in schema], schema=schema)

    def marked(self, stretch: Stretch, columns: Columns) -> Stretch:
        """A stretch whose rows of unreadable row groups, or with what is no weight, have got weight 0."""
        for n in range(stretch.steps):
            self._weigh(stretch, n, columns)
            lost = self.lost(stretch.schedule.epoch, stretch.step + n)
            if lost:
                weights_of(stretch, n, columns)[lost] = 0
        self.books.saw(sum(stretch.rows))
        return stretch

    def _weigh(self, stretch: Stretch, number: int, columns: Columns) -> None:
        """A weight below 0 would have a model learn the contrary, one that is no number nothing at all."""
        weights = weights_of(stretch, number, columns)
        if not columns.weight or (weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf):
            return
        wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
        error = ColumnError(f"column {columns.weight!r} holds {weights[wrong[0]]:g}, which is no weight: weights are "
                            "finite, and 0 or more")
        self.rows(error, "batch", stretch.schedule.epoch, stretch.step + number, wrong.tolist())
        weights[wrong] = 0

    def lost(self, epoch: int, step: int) -> list[int]:
        """Rows of a batch that are of row groups that could not be read."""
        if not self._groups:
            return []
        return [n for n, origin in enumerate(self._origins.batch(epoch, step)) if self._is_lost(origin)]

    def _is_lost(self, origin: Origin | None) -> bool:
        return origin is not None and origin[:2] in self._groups


def weights_of(stretch: Stretch, number: int, columns: Columns) -> npt.NDArray[Any]:
    """Of the rows of a batch, to be read and written."""
    if stretch.weights is not None:
        weights: npt.NDArray[Any] = stretch.weights[number]
    else:
        assert columns.weight is not None
        weights = stretch.floats[number, columns.floats.index(columns.weight)]
    return weights


def _zeros(kind: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.array([[]] * rows, kind)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pa.array([b""] * rows, kind)
    return pa.array([False if pa.types.is_boolean(kind) else 0] * rows, pa.int8()).cast(kind)

