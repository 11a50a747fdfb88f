"""Yields whole row groups in an exact order, decoded ahead by a resizable pool of workers: `RowGroupStage`.

`sluice.petastorm.make_batch_reader` is built on it. It has no windows and no batches. Each row group comes through
Petastorm's worker as a dict of arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from sluice.etl.schema import digest
from sluice.ingest.errors import LoadingError
from sluice.ingest.flow.decoded import Decoded, ReadTask
from sluice.ingest.knobs import DECODE, Knobs
from sluice.ingest.machine import Machine
from sluice.ingest.memory.governor import Charge
from sluice.ingest.memory.process_memory import ProcessMemory
from sluice.ingest.permutations import permutation
from sluice.ingest.read.petastorm.source import PetastormSource
from sluice.ingest.row_order import EpochSchedule, Read, WindowPart, differences_of
from sluice.ingest.stage_spec import DECODING
from sluice.ingest.stages.stage_pools import StagePools

if TYPE_CHECKING:
    from sluice.ingest.read.reader import RowGroupReader


class RowGroupError(LoadingError):
    """An order of row groups is invalid, or a position belongs to another order. The message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroupOrder:
    """The order of row groups, and of the rows in them. It depends only on these values and the epoch."""

    groups: tuple[tuple[int, ...], ...]
    """The number of rows of each row group, file by file. Row groups without rows are skipped."""
    seed: int = 0
    shuffle_groups: bool = True
    shuffle_rows: bool = False

    def reads(self, epoch: int) -> list[Read]:
        there = [
            Read(file, group, rows, (WindowPart(0, 0, 0, rows),))
            for file, counts in enumerate(self.groups)
            for group, rows in enumerate(counts)
            if rows
        ]
        if not self.shuffle_groups:
            return there
        return [there[n] for n in permutation(len(there), "row groups", self.seed, epoch)]

    @property
    def digest(self) -> str:
        return digest([self.groups, self.seed, self.shuffle_groups, self.shuffle_rows])

    def state(self, epoch: int, number: int) -> dict[str, Any]:
        """Returns the position of the next row group as a dict for JSON, with the values that a resumed run must
        share."""
        return {"epoch": epoch, "row_group": number, **self._identity}

    def position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the position in `state`. RowGroupError, with the differences, if it belongs to another order."""
        if differences := differences_of(state, self._identity):
            # A hash would not help the user, so it is not named.
            others = (
                "; ".join(differences[1:]) or "the row groups, or their numbers of rows, differ"
            )
            raise RowGroupError(f"this state belongs to another order of row groups ({others})")
        return int(state["epoch"]), int(state["row_group"])

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "order": self.digest,
            "seed": self.seed,
            "shuffle_row_groups": self.shuffle_groups,
            "shuffle_rows": self.shuffle_rows,
            "files": len(self.groups),
            "row_groups": sum(rows > 0 for counts in self.groups for rows in counts),
        }


class RowGroupStage(StagePools):
    """Reads row groups ahead. It has one stage, with the same knobs as the `decode` stage of every pipeline."""

    def __init__(
        self,
        groups: RowGroupReader,
        source: PetastormSource,
        order: RowGroupOrder,
        *,
        machine: Machine,
        memory_limit: int | None,
        workers: int,
    ):
        super().__init__((DECODING,), machine, groups)
        self._source, self._order = source, order
        self.memory = ProcessMemory(machine, memory_limit, self._buffers)
        largest = max((rows for counts in groups.row_groups for rows in counts), default=0)
        self._minimum = groups.decoding.at_work(largest), ""
        self._renew_governor()
        self.apply(self.limits.clamp(Knobs(workers={DECODE: workers})))

    def start(self, epoch: int, number: int, epochs: int | None) -> Iterator[Decoded]:
        """Yields row groups, starting with row group `number` of `epoch`, until `epochs` have ended. None: for ever."""
        self.stop()
        with self._lock:
            self._renew_governor()
            return self._pool(
                DECODE,
                self._read_tasks(epoch, number, epochs),
                lambda: self._work,
                size=lambda task: self._groups.decoding.at_work(task.read.rows),
                measure=_rows_and_bytes,
            )

    def _read_tasks(self, epoch: int, number: int, epochs: int | None) -> Iterator[ReadTask]:
        while epochs is None or epoch < epochs:
            reads, schedule = self._order.reads(epoch), EpochSchedule(epoch, 0, (), (), ())
            if not reads:
                return
            for read in reads[number:]:
                yield ReadTask(schedule, read)
            epoch, number = epoch + 1, 0

    def _work(self, task: ReadTask, charge: Charge) -> Decoded:
        decoded, read = self._source.work(task, charge), task.read
        if self._order.shuffle_rows:
            rows, key = rows_of(decoded.rows), (self._order.seed, task.schedule.epoch)
            order = permutation(rows, "rows", *key, read.file, read.group)
            decoded.rows = {name: values[order] for name, values in decoded.rows.items()}
        return decoded


def rows_of(columns: Mapping[str, npt.NDArray[Any]]) -> int:
    return len(next(iter(columns.values()), ()))


def _rows_and_bytes(decoded: Decoded) -> tuple[int, int]:
    return rows_of(decoded.rows), sum(values.nbytes for values in decoded.rows.values())
