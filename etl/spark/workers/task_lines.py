"""`TaskLines`: the lines of a task's part of the input, which the worker reads with Arrow, as the local engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sluice.etl.apply.parse import Batches
from sluice.etl.read.pieces import FileRange, Piece, pieces_of_ranges


@dataclass(frozen=True, slots=True)
class TaskLines:
    """The parts of all tasks, and how a worker reads them."""

    ranges: Callable[[], Sequence[tuple[FileRange, ...]]]
    """Returns the ranges of each task, by its number."""
    headers: tuple[bytes, ...]
    """The lines that are left out."""
    located: bool
    """Whether lines have `_file`, and `_from`, the number of their piece."""

    def of(self, number: int) -> Batches:
        """Yields the lines of a task. A batch is valid until the next one is requested."""
        for piece in pieces_of_ranges(self.ranges()[number]):
            for batch in piece.batches(self.headers):
                yield _locate(piece, batch) if self.located else batch

    def of_all(self, tasks: Batches) -> Batches:
        """Yields the lines of all tasks that are numbered in a column `id`."""
        for batch in tasks:
            for number in batch["id"].to_pylist():
                yield from self.of(number)


def work_on_lines(lines: TaskLines, work: Callable[[Batches], Batches], tasks: Batches) -> Batches:
    """Calls a function on the lines of tasks. Runs in a worker."""
    yield from work(lines.of_all(tasks))


def _locate(piece: Piece, lines: pa.RecordBatch) -> pa.RecordBatch:
    """Adds the file and the number of the piece to each line."""
    names = pa.repeat(piece.file.name_in_rejects, lines.num_rows)
    numbers = pa.repeat(piece.number, lines.num_rows)
    return pa.record_batch([lines["line"], names, numbers], ["line", "_file", "_from"])
