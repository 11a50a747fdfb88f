"""Where a batch has the columns of a function that takes a matrix: `MatrixPlace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.ingest.columns import Columns
from sluice.ingest.process.matrix_function import MATRIX
from sluice.ingest.stages.batch import BatchSeries
from sluice.ingest.stages.transform import Arrays, Given, Transform, TransformError


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """The columns of a function that takes a matrix."""

    names: tuple[str, ...]
    kind: type[np.number[Any]]
    first: int | None
    """The number of the first among all columns of floats, or of ids. None: they do not lie together in this order, or
    some must not be written."""

    @classmethod
    def of(cls, transform: Transform, columns: Columns) -> MatrixPlace:
        """Raises TransformError if these columns do not make a matrix."""
        names = transform.reads or columns.dense
        floats = columns.floats
        kinds: dict[str, type[np.number[Any]]] = {
            name: np.float32 if name in floats else columns.id_kind(name)
            for name in names
            if name in (*floats, *columns.sparse)  # an unknown name is an error of every function
        }
        bags = [name for name in names if name in columns.bags]
        if transform.added or bags or len(set(kinds.values())) != 1:
            types = [f"{name} ({kind.__name__})" for name, kind in kinds.items()]
            raise TransformError(
                f"transform {transform.name!r}: its function takes a matrix. So it needs columns of one type "
                "(reads=[…], inputs in a spec), has no bags and no new outputs; columns: "
                f"{', '.join(types)}; bags: {bags}; new outputs: {list(transform.added)}"
            )
        kind = next(iter(kinds.values()))
        among = floats if kind is np.float32 else columns.sparse
        first = among.index(names[0]) if names[0] in among else 0
        together = among[first : first + len(names)] == tuple(names)
        writable = not transform.outputs or transform.outputs.keys() >= set(names)
        usable = together and writable and columns.weight not in names
        return cls(tuple(names), kind, first if usable else None)

    def matrix(self, series: BatchSeries, number: int) -> npt.NDArray[Any] | None:
        """Returns the columns of batch `number` [rows, columns] without copying. None: they do not lie together."""
        if self.first is None:
            return None
        end = self.first + len(self.names)
        if self.kind is np.float32:
            floats: npt.NDArray[Any] = series.floats[number, self.first : end]
            return floats.T
        ids = series.ids[number]
        values = ids.values[ids.starts[self.first] : ids.starts[end]].view(self.kind)
        return values.reshape(len(self.names), -1).T

    def check_result(self, given: Given, arrays: Arrays, where: str) -> None:
        """Raises TransformError if the function returned another shape than that of its matrix."""
        shape = len(next(iter(arrays.values()))), len(self.names)
        if given and MATRIX in given and given[MATRIX].shape != shape:
            raise TransformError(
                f"{where}: it returned shape {given[MATRIX].shape} for a matrix of shape {shape}; return the same "
                "shape, or change the given matrix"
            )
