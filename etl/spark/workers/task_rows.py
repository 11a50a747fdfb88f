"""`TaskRows`: the rows of a task's part of the input, which the worker reads with Arrow, as the local engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sluice.etl.apply.parse import Batches
from sluice.etl.read.input_files import Part, pieces_of_parts


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The parts of all tasks, and how a worker reads them."""

    parts: Callable[[], Sequence[tuple[Part, ...]]]
    """Returns the parts of each task, by its number."""
    headers: tuple[bytes, ...]
    """The lines that are left out."""
    located: bool
    """Whether rows have `_file`, and `_from`, the number of their piece."""

    def of(self, number: int) -> Batches:
        """Yields the rows of a task before parsing. A batch is valid until the next one is requested."""
        for piece in pieces_of_parts(self.parts()[number]):
            for batch in piece.batches(self.headers):
                if not self.located:
                    yield batch
                    continue
                names = pa.repeat(piece.file.name_in_rejects, batch.num_rows)
                numbers = pa.repeat(piece.number, batch.num_rows)
                yield batch.append_column("_file", names).append_column("_from", numbers)

    def of_all(self, tasks: Batches) -> Batches:
        """Yields the rows of all tasks that are numbered in a column `id`."""
        for batch in tasks:
            for number in batch["id"].to_pylist():
                yield from self.of(number)


def work_on_rows(rows: TaskRows, work: Callable[[Batches], Batches], tasks: Batches) -> Batches:
    """Calls a function on the rows of tasks. Runs in a worker."""
    yield from work(rows.of_all(tasks))
