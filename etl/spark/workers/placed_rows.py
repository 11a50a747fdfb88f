"""`PlacedRows`: the rows of a task with their files and keys, the same in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from sluice.etl.apply.counts import COUNT_ROWS
from sluice.etl.apply.features import Features, FileAssignment
from sluice.etl.apply.parse import Batches
from sluice.etl.apply.row_placement import RowPlacement, SketchInputs
from sluice.etl.spark.workers.last_features import load_features
from sluice.etl.spark.workers.parsed_rows import ParsedRows, selected_rows
from sluice.etl.spec.row_split import Keys
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import Packed

_BLOCK_BYTES = 64 << 20
_BLOCKS = 32
"""The number of bits of a block's number in its task."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """What a worker needs to place the rows of its task."""

    placement: FileAssignment
    look: SketchInputs
    packed: Callable[[], Packed]
    parsed: ParsedRows

    @property
    def spec(self) -> Spec:
        return self.placement.spec

    def load(self) -> tuple[RowPlacement, Features]:
        state, features = load_features(self.spec, self.packed(), ahead=True)
        return RowPlacement(self.placement, self.look, features, state), features

    def blocks(
        self, batches: Batches, *, last: bool = False
    ) -> Iterator[tuple[int, tuple[dict[str, pa.Array], Keys | None]]]:
        """Yields rows with the number of their block. A worker has room for all different values of a block.

        After joins and histories, a lost task may get its rows in another order, so all its rows are in one block."""
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        block = task.partitionId() << _BLOCKS
        rows = size = 0
        for columns, keys in selected_rows(self.parsed, batches, last=last):
            if not self.spec.rows.relational and (rows >= COUNT_ROWS or size >= _BLOCK_BYTES):
                block += 1
                rows = size = 0
            yield block, (columns, keys)
            rows += len(columns[self.spec.label])
            size += sum(values.nbytes for values in columns.values())
