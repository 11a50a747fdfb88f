"""A lookup that waits like a call to a service. It has its own module because workers import it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

WAIT_S = 0.16


def lookup(_: Mapping[str, Any]) -> None:
    time.sleep(WAIT_S)
