"""The measurements of `sluice bench`: when batches came, and the peak of memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader

_LOOK_S = 0.05
_LEAST_S = 0.5  # a rate of less is that of a few batches that lay ready
_SETTLED = 1 / 3  # share of the time at its end that counts as settled


@dataclass
class BenchOutcome:
    """A consumer's measurements: when each batch came, its number of rows, and the wait for it."""

    marks: list[tuple[float, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """The seconds of waiting before each batch."""
    order_hashes: list[str | None] = field(default_factory=list)
    """The order hash of each epoch that has ended."""
    began: float | None = None
    """When the first batch was asked for, if a number of epochs is loaded: then its rows and its time count, too."""

    def rate_and_stall(self, share: float = 1.0) -> tuple[float, float]:
        """Returns the rows a second, and the share of the time in which the consumer waited.

        With `share`, only the last part of the time counts. The first batch does not count, unless it is known when all
        of it `began`."""
        begin, end = self.marks[0][0], self.marks[-1][0]
        since, first = self.began, 0
        if since is None or (share != 1 and share * (end - begin) >= _LEAST_S):
            times = enumerate(at for at, _ in self.marks)
            first, since = next((n + 1, at) for n, at in times if at >= end - share * (end - begin))
        spent = end - since
        if not spent:
            return 0.0, 0.0
        rows = sum(rows for _, rows in self.marks[first:])
        return rows / spent, min(1.0, sum(self.waits[first:]) / spent)

    def figures(self) -> dict[str, Any]:
        """Returns the figures, with the order hash of the first epoch. If a number of epochs was loaded, it is that of
        the last."""
        rate, stall = self.rate_and_stall()
        settled_rate, settled_stall = self.rate_and_stall(_SETTLED)
        if not settled_rate:
            settled_rate, settled_stall = rate, stall
        hashes = self.order_hashes
        found: dict[str, Any] = {
            "rows_per_s": round(rate),
            "rows_per_s_settled": round(settled_rate),
            "stall_fraction": round(stall, 4),
            "stall_fraction_settled": round(settled_stall, 4),
            "first_batch_s": round(self.waits[0], 3),
            "order_hash": hashes[0] if hashes else None,
            "rows": sum(rows for _, rows in self.marks),
        }
        if self.began is not None:
            found |= {"order_hash": hashes[-1], "order_hashes": hashes}
        return found


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
