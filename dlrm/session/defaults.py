"""Chooses the settings that depend on the number of training rows, if the user gives none: `defaults`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sluice.ingest.row_order import STREAMS

LEAST_STEPS = 200
"""The least steps of an epoch, if the rows suffice."""
MOST_ROWS = 8192
"""The largest batch that is chosen, in rows."""
RANKS = 64
"""A batch of at least as many rows is a multiple of this. So the number of ranks may be any power of two up to it."""
MANY_ROWS = 40_000
"""From so many rows on, a higher learning rate of the dense layers is better, for any batch size. Below, it is
worse."""


def defaults(rows: int, streams: int = STREAMS) -> dict[str, Any]:
    """Returns the settings for so many training rows. docs/training.md has the measurements behind them. A batch is a
    multiple of the streams, and from 64 rows on also of 64.

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


def describe_defaults(rows: int, given: Mapping[str, Any]) -> str:
    """Returns a text about the settings that `defaults` chose, and why. Empty if all of them are given."""
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
