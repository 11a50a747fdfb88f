"""`TaskLines`: the lines of a task's part of the input, which the worker reads with Arrow, as the local engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sluice.etl.apply.parse import Batches
from sluice.etl.read.pieces import FileRange, pieces_of_ranges


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
                if not self.located:
                    yield batch
                    continue
                names = pa.repeat(piece.file.name_in_rejects, batch.num_rows)
                numbers = pa.repeat(piece.number, batch.num_rows)
                yield pa.record_batch([batch["line"], names, numbers], ["line", "_file", "_from"])

    def of_all(self, tasks: Batches) -> Batches:
        """Yields the lines of all tasks that are numbered in a column `id`."""
        for batch in tasks:
            for number in batch["id"].to_pylist():
                yield from self.of(number)


def work_on_lines(lines: TaskLines, work: Callable[[Batches], Batches], tasks: Batches) -> Batches:
    """Calls a function on the lines of tasks. Runs in a worker."""
    yield from work(lines.of_all(tasks))
