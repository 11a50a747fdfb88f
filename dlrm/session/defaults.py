"""The settings that follow the number of training rows, where a run is begun without them: `defaults`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sluice.ingest.row_order import STREAMS

LEAST_STEPS = 200
"""The steps that an epoch has at least, where there are rows enough."""
MOST_ROWS = 8192
"""The rows of the largest batch that is chosen."""
RANKS = 64
"""A batch that has as many rows or more is a multiple of this, so that any power of two up to it may be the number of
ranks."""
MANY_ROWS = 40_000
"""From so many rows on, longer steps of the dense layers lead further, whatever the batch; below, they lead astray."""


def defaults(rows: int, streams: int = STREAMS) -> dict[str, Any]:
    """The settings for so many training rows, of which a batch has as many of each stream.
    docs/training.md tells what they were found from. A batch of 64 rows or more is a multiple of 64.

    | training rows | batch_size            | dense_lr |
    |---------------|-----------------------|----------|
    | below 3,200   | 8                     | .001     |
    | to 40,000     | a 200th of the rows   | .001     |
    | to 1,640,000  | a 200th of the rows   | .003     |
    | above         | 8,192                 | .003     |
    """
    most = min(MOST_ROWS, rows // LEAST_STEPS)
    multiple = math.lcm(streams, RANKS) if most >= math.lcm(streams, RANKS) else streams
    return {
        "batch_size": max(streams, most // multiple * multiple),
        "dense_lr": 0.001 if rows < MANY_ROWS else 0.003,
    }


def described(rows: int, given: Mapping[str, Any]) -> str:
    """Says what `defaults` chose for the settings that are not given, and why; empty if all of them are given."""
    chosen = {
        name: value
        for name, value in defaults(rows, given.get("streams", STREAMS)).items()
        if name not in given
    }
    if not chosen:
        return ""
    words = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    batch = chosen.get("batch_size")
    steps = (
        ""
        if batch is None
        else (
            f": {-(-rows // batch):,} steps an epoch, as a batch (of all ranks together) "
            f"makes at least {LEAST_STEPS} and has at most {MOST_ROWS:,} rows"
        )
    )
    return f"chosen for {rows:,} training rows: {words}{steps}"
