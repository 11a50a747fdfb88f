"""The cost of a row of one stage by its number of workers: `StageCost`. The tuner computes it, the forecast uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy import ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The cost of a row at one number of workers."""

    busy_s: float
    """Useful seconds of a worker, without waits for neighbours or for cores."""
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one stage. Between two numbers of workers it lies on the line between them."""

    name: str
    points: Mapping[int, Point] = field(default_factory=dict)
    """Number of workers → cost of a row. Empty: unknown."""
    item_bytes: float = 0.0
    """Bytes of an item, nearer to the larger ones. A worker holds one item while it works."""
    process_bytes: int = 0
    """Measured memory of a worker's process. 0: none was measured yet."""
    backend: str = ""
    other_backends: Mapping[str, Mapping[int, Point]] = field(default_factory=dict)
    """Back end → points there."""

    def on(self, backend: str) -> StageCost:
        """Returns the cost on another back end."""
        return replace(self, backend=backend, points=self.other_backends[backend])

    def busy_s(self, workers: int) -> float:
        """Returns the useful seconds of a row that each of `workers` needs."""
        point = self.points.get(workers)
        return float(self.curves(np.array([workers]))[0][0]) if point is None else point.busy_s

    def cpu_s(self, workers: int) -> float:
        """Returns the processor seconds of a row with `workers`."""
        point = self.points.get(workers)
        return float(self.curves(np.array([workers]))[1][0]) if point is None else point.cpu_s

    def curves(self, workers: ndarray) -> tuple[ndarray, ndarray]:
        """Returns `busy_s` and `cpu_s` of many numbers of workers at once."""
        seen = sorted(self.points)
        points = [self.points[count] for count in seen]
        return (
            np.interp(workers, seen, [point.busy_s for point in points]),
            np.interp(workers, seen, [point.cpu_s for point in points]),
        )
