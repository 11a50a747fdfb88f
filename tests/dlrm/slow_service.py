"""Transforms that ask a service. It takes far longer to answer than a small model for a step, on any machine."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

ANSWER_S = 0.15


def ask(columns: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Asks a service that is slow for one host: it answers one request at a time, however many ask."""
    if platform.node() == "host1":
        with open(Path(os.environ["TMPDIR"], "service"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(ANSWER_S)  # the fault itself
    return columns


def ask_beside_others(columns: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Asks a service that answers all who ask at the same time."""
    time.sleep(ANSWER_S)  # the fault itself
    return columns
