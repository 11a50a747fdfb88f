"""A spec put to work on one batch after another: `Features` makes the table's columns, `Placement` says where rows go.

Both are arithmetic on Arrow arrays: Spark's workers, the tests' slow twin and, later, serving run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.ops import Fitted
from etl.ops.base import as_number, as_text
from etl.ops.hashing import hash_rows, mix
from etl.spec import ROLE_KINDS, ColumnSpec, Spec
from etl.state import State

_SPLIT = np.uint64(0x5EED5EED00000001)
_FLOAT = np.finfo(np.float32)


class Features:
    """Applies every column's operators; the fitted ones look things up in `state`."""

    def __init__(self, spec: Spec, state: State) -> None:
        self.spec = spec
        self._prepared = {key: op.prepare(state[key]) for _, key, op, _ in spec.fitted}

    def apply(self, raw: Mapping[str, pa.Array]) -> list[pa.Array]:
        """The table's columns, in the spec's order."""
        return [self._column(column, raw[column.source]) for column in self.spec.columns]

    def _column(self, column: ColumnSpec, values: pa.Array) -> pa.Array:
        for number, op in enumerate(column.ops):
            values = as_text(values) if op.takes == "text" else as_number(values)
            values = op.apply(values, self._prepared[column.state_key(number)] if isinstance(op, Fitted) else None)
        return _stored(values, ROLE_KINDS[column.role][1])


def cardinalities(spec: Spec, state: State) -> dict[str, int]:
    """Rows that each sparse column's embedding needs."""
    found = {}
    for column in spec.columns:
        if column.ops and column.role == "sparse":
            last = len(column.ops) - 1
            op = column.ops[last]
            size = op.cardinality(state[column.state_key(last)] if isinstance(op, Fitted) else None)
            if size is not None:
                found[column.name] = size
    return found


def _stored(values: pa.Array, type_name: str) -> pa.Array:
    kind = pa.type_for_alias(type_name)
    if kind == pa.float32():
        wide = as_number(values).to_numpy(zero_copy_only=False)
        return pa.array(np.clip(wide, _FLOAT.min, _FLOAT.max).astype(np.float32))
    return values.cast(kind)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which split and which file a row belongs to, by its key alone: not by the cluster, nor by other rows."""

    seed: int
    shares: Mapping[str, float]
    files: tuple[int, ...]
    """Number of files of each split, in the order of `shares`."""

    @classmethod
    def of(cls, spec: Spec, rows: int) -> Placement:
        """Enough files that each holds about `table.file_rows`."""
        files = tuple(max(1, -(-int(rows * share) // spec.table.file_rows)) for share in spec.table.split.values())
        return cls(spec.table.seed, dict(spec.table.split), files)

    @property
    def total(self) -> int:
        return sum(self.files)

    def keys(self, raw: Mapping[str, pa.Array]) -> npt.NDArray[np.uint64]:
        return hash_rows(list(raw.values()), self.seed)

    def split(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Number of the split of each row."""
        share = (mix(keys ^ _SPLIT) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        bounds = np.cumsum(list(self.shares.values()))[:-1]
        return np.searchsorted(bounds, share, side="right").astype(np.int32)

    def file(self, keys: npt.NDArray[np.uint64], split: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Number of the file of each row, over all splits."""
        counts = np.array(self.files, np.uint64)
        first = np.cumsum([0, *self.files[:-1]]).astype(np.int32)
        return first[split] + (keys % counts[split]).astype(np.int32)
