"""`takes_matrix` marks a function that takes equal columns of a batch as one array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[Any]
MATRIX = ""
"""The name under which a function gets the batch's own memory of all its columns. No column has this name."""


class MatrixFunction:
    """A function over a matrix [rows, columns] that is called with columns by name."""

    def __init__(self, function: Callable[[Matrix], Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, columns: Mapping[str, Matrix]) -> dict[str, Matrix]:
        """Returns the changed columns. It changes what it got as `MATRIX` in place if the types agree. A result of
        another shape is returned as `MATRIX`, for the caller to refuse."""
        in_place = MATRIX in columns
        matrix = columns[MATRIX] if in_place else np.stack(list(columns.values())).T
        given = self._function(matrix)
        result = matrix if given is None else np.asarray(given)
        if result.shape != matrix.shape or (in_place and result.dtype != matrix.dtype):
            return {MATRIX: result}
        if not in_place:
            return dict(zip(columns, result.T, strict=True))
        if result is not matrix:
            np.copyto(matrix, result)
        return {}


def takes_matrix(function: Callable[[Matrix], Any]) -> MatrixFunction:
    """Marks a transform's function that takes its columns as one numpy array [rows, columns].

        @takes_matrix
        def log_of_numbers(numbers):
            np.log1p(numbers, out=numbers)

    One call for all columns costs less than one call for each. The function changes the array, or returns one of the
    same shape. It gets the transform's columns in the order in which they are named, or all dense columns. They must
    have the same type. In threads, columns that lie together in the table are not copied."""
    return MatrixFunction(function)
