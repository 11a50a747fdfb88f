"""`FileWriter`: writes the data files of one job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from sluice.etl.apply.features import FileAssignment
from sluice.etl.apply.sorted_rows import SortedRows
from sluice.etl.table.data_files import folder_of
from sluice.etl.table.new_files import NewFile, write_file
from sluice.etl.table.store import TableStore


@dataclass(frozen=True)
class FileWriter:
    """Writes the files of one job, on every engine."""

    placement: FileAssignment
    store: TableStore
    job: str
    check_wanted: Callable[[], None] = lambda: None
    """Is called between short steps. It raises an error if the job has ended."""

    def path(self, file: int, attempt: int | None = None) -> str:
        """Returns the path of a file. If several attempts may write it, each has a path of its own."""
        folder = f"{folder_of(self.job)}/split={self._split(file)}"
        suffix = "" if attempt is None else f"-{attempt}"
        return f"{folder}/part-{file:05}{suffix}.parquet"

    def _split(self, file: int) -> str:
        ends = zip(self.placement.spec.table.split, self.placement.ends, strict=True)
        return next(split for split, end in ends if file < end)

    def write(self, file: int, rows: SortedRows, attempt: int | None = None) -> NewFile:
        """Writes a file's rows in row groups of an exact size, in the layout of the table."""
        spec = self.placement.spec
        return write_file(
            self.store,
            self.path(file, attempt),
            self._wanted(rows.pieces(spec.table.row_group_rows)),
            spec.fields({}),
            split=self._split(file),
            speed=spec.table.layout == "speed",
            buckets={c.name: op.oov for c in spec.columns for op in c.ops if hasattr(op, "oov")},
        )

    def _wanted(self, pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for piece in pieces:
            self.check_wanted()
            yield piece
        self.check_wanted()
