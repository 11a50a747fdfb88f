"""A lookup that waits as for the answer of a service: a file of its own, as workers import what stands beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

WAIT_S = 0.16


def lookup(_: Mapping[str, Any]) -> None:
    time.sleep(WAIT_S)
