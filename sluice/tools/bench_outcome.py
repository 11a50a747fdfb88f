"""The measurements of `sluice bench`: when batches came, and the peak of memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader

_LOOK_S = 0.05
_LEAST_S = 0.5  # a rate of less is that of a few batches that lay ready


@dataclass
class BenchOutcome:
    """A consumer's measurements: when each batch came, its number of rows, and the wait for it."""

    marks: list[tuple[float, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """The seconds of waiting before each batch."""
    order_hashes: list[str | None] = field(default_factory=list)
    """The order hash of each epoch that has ended."""
    began: float | None = None
    """When the first batch was asked for, if its rows and its time count, too."""

    def rows_per_s(self, share: float = 1.0) -> float:
        """Returns the rate from the first batch to the last. With `share`, only the last part of the time counts. The
        first batch does not count, unless it is known when all of it `began`."""
        since, first = self._from(share)
        spent = self.marks[-1][0] - since
        return sum(rows for _, rows in self.marks[first:]) / spent if spent else 0.0

    def stall_fraction(self, share: float = 1.0) -> float:
        """Returns the share of that time in which the consumer waited."""
        since, first = self._from(share)
        spent = self.marks[-1][0] - since
        return min(1.0, sum(self.waits[first:]) / spent) if spent else 0.0

    @property
    def order_hash(self) -> str | None:
        """Returns the order hash of the first epoch, once it has ended."""
        return self.order_hashes[0] if self.order_hashes else None

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.marks)

    def _from(self, share: float) -> tuple[float, int]:
        """Returns when the time begins that counts, and the first batch that counts."""
        begin, end = self.marks[0][0], self.marks[-1][0]
        if self.began is not None and (share == 1 or share * (end - begin) < _LEAST_S):
            return self.began, 0
        first = next(n for n, (at, _) in enumerate(self.marks) if at >= end - share * (end - begin))
        return self.marks[first][0], first + 1


def consume(
    loader: BatchLoader,
    seconds: float,
    step: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
    *,
    epochs: int | None = None,
) -> BenchOutcome:
    """Takes batches for that many seconds from the first batch on, over as many epochs as needed. With `epochs` it
    takes exactly so many, and the wait for the first batch counts. `step` is the trainer's work for a batch."""
    end, began = float("inf"), clock()
    outcome = BenchOutcome(began=None if epochs is None else began)
    while epochs is None or len(outcome.order_hashes) < epochs:
        for batch in loader:
            now = clock()
            outcome.waits.append(now - began)
            if not outcome.marks and epochs is None:
                end = now + seconds
            outcome.marks.append((now, batch.rows))
            if batch.step == len(loader) - 1:
                outcome.order_hashes.append(loader.order_hash)
            if now >= end and len(outcome.marks) > 1:
                return outcome
            step()
            began = clock()
    return outcome


class Peak:
    """A context that records the peak of memory."""

    def __init__(self, memory_used: Callable[[], int]):
        self.bytes = 0
        self._memory_used, self._stop = memory_used, threading.Event()
        self._thread = threading.Thread(target=self._look, name="sluice-peak", daemon=True)

    def _look(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(_LOOK_S)
            self.bytes = max(self.bytes, self._memory_used())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
