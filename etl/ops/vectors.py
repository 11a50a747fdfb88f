"""The operator `lookup`: a vector of numbers for each id, from a matrix in a file that is mapped into memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.ops.base import Operator, OperatorError, within
from sluice.etl.ops.lists import relisted


@dataclass(frozen=True, kw_only=True)
class Vectors(Operator):
    """The `width` numbers in the row of the matrix in `file` (numpy's .npy) that an id names."""

    name: ClassVar[str] = "lookup"
    takes: ClassVar[tuple[str, ...]] = ("id",)
    gives: ClassVar[str] = "numbers"
    file: str
    width: int

    def __post_init__(self) -> None:
        within(self, width=(1, 65_536))

    @cached_property
    def matrix(self) -> npt.NDArray[Any]:
        """The matrix, mapped into memory at first use: a spec can be read where the file is not."""
        try:
            found = np.load(self.file, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise OperatorError(f"lookup: {self.file} cannot be read ({error.strerror or error}); put the matrix "
                                "there") from None
        except ValueError as error:
            raise OperatorError(f"lookup: {self.file} holds no matrix in numpy's format ({error})") from None
        if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "fiu":
            raise OperatorError(f"lookup: {self.file} holds no matrix of numbers, one row for each id")
        if found.shape[1] != self.width:
            raise OperatorError(f"lookup: the vectors in {self.file} have {found.shape[1]} numbers, not width = "
                                f"{self.width}")
        return found

    def check_reach(self, cardinality: int | None, column: str) -> None:
        """Raises OperatorError if ids may be beyond the last vector."""
        if cardinality is not None and cardinality > len(self.matrix):
            raise OperatorError(f"lookup for {column!r}: ids go up to {cardinality - 1}, and {self.file} has "
                                f"{len(self.matrix)} vectors; write one for each id")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        ids = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.matrix)):
            wrong = ids[(ids < 0) | (ids >= len(self.matrix))][0]
            raise OperatorError(f"lookup: id {wrong} is beyond the {len(self.matrix)} vectors in {self.file}")
        found = np.asarray(self.matrix[ids], np.float64)
        return relisted(pa.array(found.reshape(-1)), np.full(len(ids), self.width))
