"""A row group to read (`ReadTask`), its rows (`Decoded`), and what is known once they are in batches (`Placed`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, Read

if TYPE_CHECKING:
    from sluice.ingest.flow.series import Chunk


LOST = {b"sluice": b"lost"}
"""The metadata of a table in place of rows that could not be read. No function over rows is called on it."""
_HELD = "held:"
"""What precedes the names of columns that are kept for functions over rows until the batches are made."""


class DamagedPage(ValueError):
    """A stored page is not what was written."""


def hold(rows: Any, table: pa.Table, names: Sequence[str]) -> Any:
    """Returns the rows of a read, a table or `StoredRows`, and with them columns of `table` for functions over rows."""
    others = others_of(rows)
    columns = dict(zip(others.column_names, others.columns, strict=True))
    with_held = pa.table(columns | {_HELD + name: table.column(name) for name in names})
    if others is rows:
        return with_held
    rows.others = with_held
    return rows


def held_of(rows: Any) -> pa.Table:
    """Returns the columns that were kept by `hold`, under their own names, each in one piece."""
    table = others_of(rows)
    names = [name for name in table.column_names if name.startswith(_HELD)]
    held = table.select(names).rename_columns([name.removeprefix(_HELD) for name in names])
    held = held.replace_schema_metadata(None)
    return held if all(c.num_chunks == 1 for c in held.columns) else held.combine_chunks()


def others_of(rows: Any) -> pa.Table:
    """Returns the columns of rows that are no stored pages."""
    return rows if isinstance(rows, pa.Table) else rows.others


@dataclass(frozen=True)
class ReadTask:
    """One read of an epoch."""

    schedule: EpochSchedule
    read: Read
    fetched: Any = None
    """The result of `RowGroupReader.fetch`."""
    charge: Charge | None = None
    """The memory of what was fetched."""
    first: int = 0
    """The number of its first row among all rows that are read, from 0 again after 2**32. Numbers rise from read to
    read."""


class Decoded:
    """The rows of one read, local or remote."""

    def __init__(
        self,
        task: ReadTask,
        rows: Any,
        charge: Charge,
        *,
        in_order: Sequence[bool] | None = None,
        made_by: Sequence[Any] = (),
    ):
        """`rows` are an Arrow table; stored pages (`ingest.read.pages.StoredRows`); or, for users of Petastorm's own
        reader, a dict of arrays. The `charge` is released with them.

        `in_order`: the rows have a batch's form, and are those of the read's parts, one part after the other. Those of
        a part that is a whole window may have the window's order.

        `made_by`: the functions whose results an earlier pass has kept."""
        self.task = task
        if task.charge is not None:
            task.charge.release()  # the reader has freed what was fetched
        self.rows = rows
        self.in_order = in_order
        self.made_by = made_by
        self.seconds = 0.0
        """How long functions have worked on it."""
        self.has_failed = False
        """Whether a function has failed on rows, which were replaced."""
        self.charge = charge

    def origin(self, row: int) -> tuple[Read, int]:
        """Returns the read of a row, and the row's number in the row group."""
        return self.task.read.origin(row)

    @property
    def nbytes(self) -> int:
        """The bytes of an Arrow table."""
        return int(self.rows.get_total_buffer_size())

    def release(self) -> None:
        """Releases the memory."""
        self.rows = None
        self.charge.release()


@dataclass
class MadeRows:
    """The columns that functions have made for some rows of batches."""

    rows: Any
    """An Arrow table."""
    origin: Callable[[int], tuple[Read, int]]
    """Returns the read of a row, and the row's number in the row group."""
    in_order: None = None


@dataclass(eq=False)
class Placed:
    """The rows of a read that are at their places in batches."""

    task: ReadTask
    first_step: int
    """The first batch that has rows of it."""
    moved: npt.NDArray[np.int64]
    """How many rows are in that batch, and in each one after it."""
    chunks: Sequence[Chunk]
    """The memory of these batches."""
    owners: Sequence[Any]
    """What owns the ids of bags, until the batches are made."""
    nbytes: int
    charge: Charge
    held: pa.Table | None = None
    """The columns of all rows that functions over rows get of it. None: there are none, or the rows are lost."""

    def __post_init__(self) -> None:
        self.rows = self._left = int(self.moved.sum())
        self._lock = threading.Lock()
        if not self.rows:
            self.held = None
        self._held_bytes = self.held.get_total_buffer_size() if self.held else 0
        self.nbytes += self._held_bytes

    def rows_in(self, step: int, steps: int) -> int:
        """Returns how many of its rows are in some batches."""
        first = max(0, step - self.first_step)
        return int(self.moved[first : max(0, step + steps - self.first_step)].sum())

    def give_away(self, rows: int) -> None:
        """Notes that so many of its rows are now in finished batches, which account for their memory."""
        with self._lock:
            self._left -= rows
            placed = self.nbytes - self._held_bytes
            if not self._left:
                self.chunks, self.owners, self.held, self._held_bytes = (), (), None, 0
            left = round(self._left * placed / max(1, self.rows))
            self.charge.correct(left + self._held_bytes)
