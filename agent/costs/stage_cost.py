"""The cost of a row of one stage by its number of workers: `StageCost`. The tuner computes it, the forecast uses it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCost:
    """The cost of one stage. Between two numbers of workers it lies on the line between them."""

    name: str
    workers: ndarray
    """Rising numbers of workers."""
    busy: ndarray
    """Useful seconds of a worker for a row with each of them, without waits for neighbours or for cores."""
    cpu: ndarray
    """Processor seconds of a row with each of them."""
    item_bytes: float = 0.0
    """Bytes of an item, nearer to the larger ones. A worker holds one item while it works."""
    process_bytes: int = 0
    """Measured memory of a worker's process. 0: none was measured yet."""
    backend: str = ""
    other: StageCost | None = None
    """The cost on the other back end. None: the stage has no other."""

    def busy_s(self, workers: int) -> float:
        """Returns the useful seconds of a row that each of `workers` needs."""
        return float(np.interp(workers, self.workers, self.busy))

    def cpu_s(self, workers: int) -> float:
        """Returns the processor seconds of a row with `workers`."""
        return float(np.interp(workers, self.workers, self.cpu))

    def curves(self, workers: ndarray) -> tuple[ndarray, ndarray]:
        """Returns `busy_s` and `cpu_s` of many numbers of workers at once."""
        return (
            np.interp(workers, self.workers, self.busy),
            np.interp(workers, self.workers, self.cpu),
        )
