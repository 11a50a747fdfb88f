"""`takes_matrix` marks a function that takes equal columns of a batch as one array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.ingest.process.protocol import check_arrow

Matrix = npt.NDArray[Any]
MATRIX = ""
"""The name under which a function gets the batch's own memory of all its columns. No column has this name."""


class MatrixFunction:
    """A function over a matrix [rows, columns] that is called with columns by name."""

    def __init__(self, function: Callable[[Matrix], Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, columns: Mapping[str, Matrix]) -> dict[str, Matrix]:
        """Returns the columns that it made. From a batch's own memory (`MATRIX`) it returns a matrix, or nothing if it
        wrote there."""
        in_place = MATRIX in columns
        matrix = columns[MATRIX] if in_place else np.stack(list(columns.values())).T
        given = self._function(matrix)
        check_arrow(given, "the matrix")
        result = matrix if given is None else np.asarray(given)
        if in_place:
            return {} if result is matrix else {MATRIX: result}
        return by_column(columns, result)


def by_column(names: Iterable[str], matrix: Matrix) -> dict[str, Matrix]:
    """Returns the columns of a function's result, whose shape may be wrong."""
    return dict(zip(names, matrix.T, strict=False))


def takes_matrix(function: Callable[[Matrix], Any]) -> MatrixFunction:
    """Marks a transform's function that takes its columns as one numpy array [rows, columns].

        @takes_matrix
        def log_of_numbers(numbers):
            np.log1p(numbers, out=numbers)

    One call for all columns costs less than one call for each. The function changes the array, or returns one of the
    same shape. It gets the transform's columns in the order in which they are named, or all dense columns. They must
    have the same type. In threads, columns that lie together in the table are not copied."""
    return MatrixFunction(function)
