"""Gives every rank the same number of batches, also when one is asked to stop: `SyncedBatches`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

from sluice.dlrm.liveness import Activity
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.finite_guard import FiniteGuard
from sluice.ingest.batch import Batch
from sluice.ingest.errors import LoaderError
from sluice.ingest.loader import BatchLoader


@dataclass(slots=True)
class TrainingStep:
    """One rank's part of a batch, and what was made of it."""

    batch: Batch
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this batch."""
    rows: int
    """The number of rows over all ranks, without padding."""
    others_s: float = 0.0
    """Seconds that this rank waited for the others, once it had its part."""
    loss: torch.Tensor | None = None
    """This rank's loss. The mean over all ranks is the loss of the batch. None: the step was not made, or all ranks
    skipped the batch, because its loss was not finite. Its rows do not count."""


class Stopped(Exception):
    """The ranks were asked to stop. All of them stop before the same batch."""


@dataclass(eq=False)
class SyncedBatches:
    """Synchronises all ranks before each batch. If one rank was asked to stop, all stop before the same batch. So no
    rank is within a step while another waits for its batch, and `end_wait` can end that wait."""

    world: Ranks
    asked_to_stop: Callable[[], bool]
    clock: Callable[[], float] = time.perf_counter
    activity: Activity = field(default_factory=Activity)
    """Records what this rank is doing."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting_on: BatchLoader | None = None
        self.stopped = False

    def batches(
        self, feed: BatchLoader, guard: FiniteGuard | None = None
    ) -> Iterator[TrainingStep]:
        """Yields the remaining batches of the feed's epoch, up to a stop. `guard` ends training on all ranks if a loss
        was not finite."""
        batches = iter(feed)

        def read_progress() -> Any:
            """Returns the loader's counters. They change as long as it makes progress."""
            with suppress(Exception):  # it is being closed, or has none
                return [(stage.items, stage.rows, stage.bytes) for stage in feed.snapshot().stages]
            return None

        try:
            for number in count(1):
                self.activity.fetches(number, read_progress)
                asked_at = self.clock()
                batch = self._next(feed, batches) if not self.asked_to_stop() else None
                wait_s = self.clock() - asked_at
                self.activity.meets(number)
                met_at = self.clock()
                self.stopped, rows, failed = self._agree(
                    batch, guard is not None and guard.has_failed()
                )
                others_s = self.clock() - met_at
                if failed and guard is not None:
                    guard.end()
                if batch is None or self.stopped:
                    return
                self.activity.steps(number)
                yield TrainingStep(clear_padding(batch), wait_s, feed.state_dict(), rows, others_s)
        finally:
            self.activity.rests()

    def all_of(self, feed: BatchLoader) -> Iterator[Batch]:
        """Yields all batches of the feed. Raises Stopped if the ranks were asked to stop, because the result would be
        incomplete."""
        for step in self.batches(feed):
            yield step.batch
        if self.stopped:
            raise Stopped

    def end_wait(self) -> None:
        """Ends a wait for a batch. Another thread calls it after this rank was asked to stop."""
        with self._lock:
            if self._waiting_on is not None:
                self._waiting_on.close()

    def _next(self, feed: BatchLoader, batches: Iterator[Batch]) -> Batch | None:
        with self._lock:
            self._waiting_on = feed
        try:
            return next(batches, None)  # only this call is timed as the loader's
        except LoaderError:
            if not self.asked_to_stop():
                raise
            return None  # closed by `end_wait`
        finally:
            with self._lock:
                self._waiting_on = None

    def _agree(self, batch: Batch | None, failed: bool) -> tuple[bool, int, bool]:
        """Returns whether any rank was asked to stop, the rows of this batch over all ranks, and whether a loss of any
        rank was not finite."""
        stop_asked = self.asked_to_stop()
        rows = 0 if batch is None else batch.rows
        if self.world.ranks == 1:
            return stop_asked, rows, failed
        ranks_asked, rows, ranks_failed = self.world.sum(
            torch.tensor([int(stop_asked), rows, int(failed)])
        ).tolist()
        return ranks_asked > 0, rows, ranks_failed > 0


def clear_padding(batch: Batch) -> Batch:
    """Returns the batch with zeros in its padding rows, and without their ids, so that no optimiser counts a table's
    row as used. A batch without padding is returned unchanged."""
    rows = len(batch.label)
    if batch.rows == rows:
        return batch
    real = batch.weight != 0
    lengths = batch.lengths.view(-1, rows)
    looked_up = torch.repeat_interleave(real.repeat(len(lengths)), batch.lengths)
    return replace(
        batch,
        dense=torch.where(real.unsqueeze(1), batch.dense, 0.0),
        values=batch.values[looked_up],
        lengths=(lengths * real).to(lengths.dtype).flatten(),
        label=torch.where(real, batch.label, 0.0),
    )
