"""The user's functions of the tuned race, as Sluice takes them. A worker process that imports them imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers import functions
from sluice import takes_matrix


@takes_matrix
def bucket(dense: np.ndarray) -> np.ndarray:
    return functions.bucket(dense)


def walk(columns: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"walked": functions.walk(columns["query"].to_pylist())}
