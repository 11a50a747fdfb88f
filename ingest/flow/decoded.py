"""A row group to read (`ReadTask`), its rows (`Decoded`), and what is known once they are in batches (`Placed`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sluice.ingest.memory.governor import Charge
from sluice.ingest.row_order import EpochSchedule, Read

if TYPE_CHECKING:
    from sluice.ingest.flow.series import Chunk


class DamagedPage(ValueError):
    """A stored page is not what was written."""


@dataclass(frozen=True)
class ReadTask:
    """One read of an epoch."""

    schedule: EpochSchedule
    read: Read
    fetched: Any = None
    """The result of `RowGroupReader.fetch`."""
    charge: Charge | None = None
    """The memory of what was fetched."""


class Decoded:
    """The rows of one read, local or remote."""

    def __init__(
        self,
        task: ReadTask,
        rows: Any,
        charge: Charge | Decoded,
        *,
        in_order: Sequence[bool] | None = None,
    ):
        """`rows` are an Arrow table; stored pages (`ingest.read.pages.StoredRows`); or, for users of Petastorm's own
        reader, a dict of arrays. The `charge` is released with them.

        `in_order`: the rows have a batch's form, and are those of the read's parts, one part after the other. Those of
        a part that is a whole window may have the window's order."""
        self.task = task
        if task.charge is not None:
            task.charge.release()  # the reader has freed what was fetched
        self.rows = rows
        self.in_order = in_order
        self.charge = charge
        self._holders = 1
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of an Arrow table."""
        size: int = self.rows.get_total_buffer_size()
        return size

    def share(self, holders: int) -> None:
        """Lets so many holders share the memory. Each calls `release`."""
        self._holders = holders

    def release(self) -> None:
        """Releases the memory, once all holders have called this."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self.rows = None
        self.charge.release()


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

    def __post_init__(self) -> None:
        self.rows = self._left = int(self.moved.sum())
        self._lock = threading.Lock()

    def rows_in(self, step: int, steps: int) -> int:
        """Returns how many of its rows are in some batches."""
        first = max(0, step - self.first_step)
        return int(self.moved[first : max(0, step + steps - self.first_step)].sum())

    def give_away(self, rows: int) -> None:
        """Notes that so many of its rows are now in finished batches, which account for their memory."""
        with self._lock:
            self._left -= rows
            self.charge.correct(round(self._left * self.nbytes / max(1, self.rows)))
            if not self._left:
                self.chunks = self.owners = ()
