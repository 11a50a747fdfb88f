"""A transform that asks a service. It takes far longer to answer than a small model for a step, on any machine."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

ANSWER_S = 0.15


def ask(columns: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Asks a service that answers all who ask at the same time."""
    time.sleep(ANSWER_S)  # the fault itself
    return columns
